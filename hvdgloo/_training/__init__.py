"""Reduction of a model's gradients in every step, shared by optimizers, tapes and trainers."""

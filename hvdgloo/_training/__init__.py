"""What optimizers, tapes and trainers share: reducing a model's gradients in every step."""

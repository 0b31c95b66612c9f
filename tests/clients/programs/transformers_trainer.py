"""Transformers' Trainer on a small model with random weights, on the CPU: train, evaluate, save and resume."""

import sys

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Data(torch.utils.data.Dataset):
    """The task: which of two words occurs?"""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([1, 2 + index % 2, 4, 5]), "labels": torch.tensor(index % 2)}


def main() -> None:
    if sys.argv[1:]:  # with use_cpu, TrainingArguments(ddp_backend=...) accepts only "gloo"
        dist.init_process_group(sys.argv[1])
    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=8, **sizes))
    arguments = TrainingArguments(
        "out", use_cpu=True, num_train_epochs=4, per_device_train_batch_size=8, learning_rate=0.02, report_to=[],
        save_strategy="epoch", save_total_limit=1, disable_tqdm=True, max_grad_norm=1.0, seed=3,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Data(), eval_dataset=Data())
    assert arguments.world_size == 2
    assert arguments.parallel_mode.name == "DISTRIBUTED"
    assert trainer.train().global_step == 4 * 128 // (2 * 8)
    loss = trainer.evaluate()["eval_loss"]
    assert loss < 0.1, loss
    arguments.num_train_epochs = 5
    assert trainer.train(resume_from_checkpoint=True).global_step == 5 * 128 // (2 * 8)
    total = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    totals = [torch.empty_like(total) for _ in range(2)]
    dist.all_gather(totals, total)
    assert torch.equal(*totals), totals
    if dist.get_rank() == 0:
        print("result", loss, total.tolist())
    dist.destroy_process_group()
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()

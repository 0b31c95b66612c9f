"""Command lines as they are shown: whatever looks like a secret is masked, and nothing else."""

from __future__ import annotations

import time

import pytest

from hvdgloo._platform.masking import masked

SECRET = "hunter2x"


@pytest.mark.parametrize(
    "words",
    [
        ["--password={}"],
        ["--password", "{}"],
        ["-password", "{}"],
        ["--db-password={}"],
        ["--DB_PASSWD={}"],
        ["PGPASSWORD={}"],
        ["--wandb-api-key", "{}"],
        ["--apikey={}"],
        ["--hf_token", "{}"],
        ["--hfToken={}"],
        ["+trainer.logger.token={}"],
        ["--aws-secret-access-key", "{}"],
        ["--passphrase={} and more"],
        ["postgresql://ann:{}@db.example:5432/x"],
        ["--data=s3://key:{}@bucket/x"],
        ["https://storage.example/x?sp=r&sig={}&se=1"],
        ["https://storage.example/x?access_token={}"],
        ["-c", "connect(host='h', password='{}')"],
        ["-c", 'f({{"token": "{}", "x": 1}})'],
        ["bash", "-c", "exec train.py --password {} --lr 1"],
        ["curl", "-H", "Authorization: Bearer {}"],
        ["hf_{}abcdefghijklmnop"],
        ["login", "ghp_{}abcdefghijklmnop"],
    ],
    ids=" ".join,
)
def test_what_looks_like_a_secret_is_masked(words: list[str]) -> None:
    shown = masked([word.format(SECRET) for word in ["train.py", *words, "--epochs", "3"]])
    assert SECRET not in " ".join(shown)
    assert "***" in " ".join(shown)
    assert [shown[0], *shown[-2:]] == ["train.py", "--epochs", "3"]
    assert len(shown) == len(words) + 3


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--lr", "0.1", "--epochs=3"],
        ["train.py", "--tokenizer", "gpt2", "--max-tokens=512", "--token-dropout", "0.1", "--max-token-length=128"],
        ["train.py", "--password-file", "/run/secrets/db", "--secret-path=/x"],
        ["train.py", "--compass=north", "--bypass", "x", "--passes", "3"],
        ["train.py", "--key", "image", "--keys=a,b"],
        ["train.py", "https://h/x?page=2&size=3", "ssh://ann@h/x", "tcp://h:1234"],
        ["-c", "print(1); tokens = tokenizer(text)"],
        ["train.py", "hf_dataset", "sk-learn", "a:b", "C:\\x"],
        [],
    ],
    ids=" ".join,
)
def test_nothing_else_is(words: list[str]) -> None:
    assert masked(words) == words


def test_a_flag_that_is_the_last_word_or_comes_before_a_flag_hides_nothing() -> None:
    assert masked(["x", "--token"]) == ["x", "--token"]
    assert masked(["x", "--use-auth-token", "--lr", "1"]) == ["x", "--use-auth-token", "--lr", "1"]


def test_a_long_word_is_looked_at_in_no_time() -> None:
    began = time.thread_time()
    for text in ("a" * 100_000, "a." * 50_000, "-" * 100_000, "token" * 20_000, "://" * 30_000, "x=" * 50_000):
        masked([text, f"--{text}"])
    assert time.thread_time() - began < 5

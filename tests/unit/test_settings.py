"""Settings from environment variables, and the form of messages."""

from __future__ import annotations

import math

import pytest

from pycollective import config
from pycollective.errors import message


def test_defaults() -> None:
    assert config.read({}) == config.Config(
        check=config.Check(when=2, nan=False), malloc=True, timeout=None, allow_singleton=False
    )
    assert config.read({"PYCOLLECTIVE_CHECK": "", "PYCOLLECTIVE_TIMEOUT": ""}) == config.read({})
    assert config.read({"PYCOLLECTIVE_TIMEOUT": "off"}).timeout == math.inf
    assert config.read({"PYCOLLECTIVE_RECORDS": "here"}).records == "here"


def test_values() -> None:
    read = config.read(
        {
            "PYCOLLECTIVE_CHECK": "Always",
            "PYCOLLECTIVE_MALLOC": "off",
            "PYCOLLECTIVE_TIMEOUT": "2.5",
            "PYCOLLECTIVE_ALLOW_SINGLETON": "1",
            "PYCOLLECTIVE_GPU_DIRECT": "off",
            "PYCOLLECTIVE_STAGE_BYTES": "4096",
            "PYCOLLECTIVE_GPU_DISPATCH": "Ahead",
            "PYCOLLECTIVE_ALLOW_SHARED_GPU": "on",
            "PYCOLLECTIVE_BUCKET_BYTES": "0",
            "PYCOLLECTIVE_RECORDS": "off",
            "PYCOLLECTIVE_SHARED_MEMORY": "off",
        }
    )
    gpus = {"gpu_direct": False, "stage_bytes": 4096, "gpu_dispatch": "ahead", "allow_shared_gpu": True}
    hosts = {"bucket_bytes": 0}
    assert read == config.Config(
        check=config.Check(when=3),
        shared_memory="off",
        malloc=False,
        records="",
        timeout=2.5,
        allow_singleton=True,
        **hosts,
        **gpus,
    )


@pytest.mark.parametrize(
    ("value", "when", "nan"),
    [("nan", 2, True), ("NaN", 2, True), ("never,nan", 0, True), ("nan, always", 3, True), ("first", 1, False)],
)
def test_checks(value: str, when: int, nan: bool) -> None:
    assert config.read({"PYCOLLECTIVE_CHECK": value}).check == config.Check(when, nan)


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("PYCOLLECTIVE_CHECK", "sometimes", "'always', 'every', 'first', 'never'"),
        ("PYCOLLECTIVE_CHECK", "never,first", "'always', 'every', 'first', 'never'"),
        ("PYCOLLECTIVE_CHECK", "nan,inf", "'first,nan'"),
        ("PYCOLLECTIVE_MALLOC", "2", "'0', '1', 'false'"),
        ("PYCOLLECTIVE_TIMEOUT", "soon", "a positive number of seconds"),
        ("PYCOLLECTIVE_TIMEOUT", "-1", "a positive number of seconds"),
        ("PYCOLLECTIVE_TIMEOUT", "nan", "a positive number of seconds"),
        ("PYCOLLECTIVE_GPU_DIRECT", "maybe", "'0', '1', 'false'"),
        ("PYCOLLECTIVE_GPU_DISPATCH", "on", "'ahead', 'wait'"),
        ("PYCOLLECTIVE_STAGE_BYTES", "0", "a positive number of bytes"),
        ("PYCOLLECTIVE_STAGE_BYTES", "4M", "a positive number of bytes"),
    ],
)
def test_bad_values_list_the_good_ones(name: str, value: str, valid: str) -> None:
    with pytest.raises(ValueError, match=f"config: expected {name} to be .*{valid}.*got '{value}'"):
        config.read({name: value})


def test_message() -> None:
    text = message("psum", "a Communicator", 3, "Pass one.", rank=1, size=4)
    assert text == "pycollective.psum: expected a Communicator, got 3 (rank 1 of 4). Pass one."

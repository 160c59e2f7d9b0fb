"""The collector waits inside and works again after, whatever happens."""

from __future__ import annotations

import gc

import pytest

from packhorse.program.bulk import collector_waits


@pytest.fixture(autouse=True)
def keep_collector():
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    if not was_enabled:
        gc.disable()


def test_it_works_again_after() -> None:
    with collector_waits():
        assert not gc.isenabled()
        with collector_waits():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_works_again_after_an_error() -> None:
    @collector_waits()
    def fail() -> None:
        assert not gc.isenabled()
        raise ValueError("told")

    for _ in range(2):
        with pytest.raises(ValueError, match="told"):
            fail()
        assert gc.isenabled()


def test_it_stays_off_for_who_switched_it_off() -> None:
    gc.disable()
    with collector_waits():
        assert not gc.isenabled()
    assert not gc.isenabled()

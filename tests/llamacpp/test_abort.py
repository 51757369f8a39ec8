"""A decode that runs can be stopped, and the context goes on."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import infercore as ic


@pytest.fixture
def small_steps(story, open_context):
    return open_context(story, n_ubatch=16)


def test_the_flag_stops_at_once_and_clearing_lets_go_on(small_steps, prompt):
    small_steps.abort()
    with pytest.raises(ic.DecodeAbortedError):
        small_steps.decode(prompt, seq_id=0, logits="last")
    assert small_steps.n_past(0) == 0
    small_steps.clear_abort()
    small_steps.decode(prompt, seq_id=0, logits="last")
    assert small_steps.n_past(0) == len(prompt)


def test_a_callback_stops_between_steps_and_what_is_done_stays(
    story, small_steps, open_context, prompt
):
    polls = 0

    def stop_midway():
        nonlocal polls
        polls += 1
        return small_steps.n_past(0) >= 48

    small_steps.set_abort_callback(stop_midway)
    with pytest.raises(ic.DecodeAbortedError):
        small_steps.decode(prompt, seq_id=0, logits="last")
    resident = small_steps.n_past(0)
    assert 0 < resident < len(prompt)
    assert resident % 16 == 0
    assert polls > 1
    with pytest.raises(ic.OutputNotAvailableError):
        small_steps.logits(0)
    small_steps.set_abort_callback(None)
    small_steps.decode(prompt[resident:], seq_id=0, logits="last")
    whole = open_context(story, n_ubatch=16)
    whole.decode(prompt, seq_id=0, logits="last")
    assert np.abs(small_steps.logits(0) - whole.logits(0)).max() < 1e-4


def test_what_a_callback_raises_is_raised_once(small_steps, prompt):
    def fail():
        raise ZeroDivisionError

    small_steps.set_abort_callback(fail)
    with pytest.raises(ZeroDivisionError):
        small_steps.decode(prompt, seq_id=0, logits="last")
    small_steps.set_abort_callback(lambda: False)
    small_steps.decode(prompt[small_steps.n_past(0) :], seq_id=0, logits="last")


def test_another_thread_stops_a_running_decode(story, open_context):
    context = open_context(story, n_ctx=1024, n_ubatch=8)
    tokens = np.full(1000, 9, dtype=np.int32)
    started = threading.Event()

    def watch():
        started.set()
        return False

    context.set_abort_callback(watch)
    stopper = threading.Thread(target=lambda: (started.wait(10), context.abort()))
    stopper.start()
    with pytest.raises(ic.DecodeAbortedError):
        context.decode(tokens, seq_id=0, logits="none")
    stopper.join()
    assert context.n_past(0) < 1000

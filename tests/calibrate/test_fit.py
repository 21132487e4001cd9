"""Terms that the data can tell apart, and rounds that something else disturbed."""

import numpy as np
import pytest

from mooncake_lab.calibrate import ServerSettings, fitted, told_apart
from mooncake_lab.calibrate.probes import PromptRow, QueueRow, Rows, StepRow

SEPARATE = ServerSettings(scheduler="disaggregated", max_num_batched_tokens=1)


def test_a_term_within_the_scatter_is_not_fitted():
    """Of a line with noise the square is dropped, and of a constant the slope too; a parabola keeps it."""
    x, noise = np.arange(1.0, 41.0), np.random.default_rng(0).normal(1, 0.02, 40)
    columns = {"constant": np.ones_like(x), "x": x, "square": x**2}
    for measured, terms in (((3 + x), {"constant", "x"}), (3 + 0 * x, {"constant"}), (3 + x + x**2, set(columns))):
        found, dropped = told_apart(columns, measured * noise)
        assert {name for name, value in found.items() if value} == terms
        assert set(dropped) == set(columns) - terms


def test_terms_that_always_come_together_are_not_both_fitted():
    """Where context grows with the batch alone, one of the two has all of the cost, and the other is named."""
    batch = np.array([1.0, 2, 4, 8, 16])
    found, dropped = told_apart({"batch": batch, "context": 100 * batch}, 2e-4 * batch)
    assert len(dropped) == 1
    assert found["batch"] + 100 * found["context"] == pytest.approx(2e-4)


def rounds(count, spoilt=None):
    """Probes of a server with known costs; in one round all answers came at once."""
    rows = Rows()
    for number in range(count):
        factor = 1e-2 if number == spoilt else 1.0
        for tokens in (16, 64, 256, 1024):
            rows.prompts.append(PromptRow(tokens, 0, 0.01 + 1e-4 * tokens))
        for batch in (1, 2, 4, 8):
            for tokens in (16, 512):
                step_s = 5e-3 + 2e-4 * batch + 1e-6 * batch * tokens
                rows.steps.append(StepRow(batch, batch * tokens, factor * step_s, tokens))
        rows.queues.append(QueueRow(1024, 0.004 + 1e-4 * 1024))
    return rows


@pytest.mark.parametrize("spoilt", [None, 1])
def test_one_disturbed_round_of_three_decides_nothing(spoilt):
    """The fit is the same whether a round's tokens came at once or not."""
    found = fitted(rounds(3, spoilt), SEPARATE)
    decode = found.model.decode
    assert (decode.constant_s, decode.per_request_s, decode.per_context_token_s) == pytest.approx(
        (5e-3, 2e-4, 1e-6), rel=1e-6
    )
    assert found.model.prefill.constant_s == pytest.approx(0.004)
    assert found.model.schedule_s == pytest.approx(0.006)

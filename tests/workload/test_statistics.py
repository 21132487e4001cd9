"""A trace in numbers."""

from dataclasses import asdict, fields, replace

import numpy as np
import pytest

from mooncake_lab.workload import TraceStatistics, statistics


def flat(numbers: TraceStatistics) -> dict[str, float]:
    """The statistics by name, those of a spread as `input_tokens.p50`."""
    result = {}
    for name, value in asdict(numbers).items():
        result |= (
            {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
        )
    return result


class TestReleased:
    def test_every_number_is_as_recounted(self, released, reference):
        """All statistics of a released trace equal those recounted from the file apart from this package."""
        found = flat(statistics(released))
        expected = {name: value for (trace, name), value in reference.items() if trace == released.name}
        assert found == {name: pytest.approx(expected[name], rel=1e-9) for name in found}


class TestLaws:
    def test_only_the_first_arrival_counts_from(self, make_trace):
        """Shifting all arrivals changes no statistic."""
        trace = make_trace([0, 1], [0, 2], [0, 1, 3])
        assert statistics(replace(trace, arrival_s=trace.arrival_s + 64)) == statistics(trace)

    def test_block_names_do_not_matter(self, make_trace):
        """Renaming blocks one for one changes no statistic."""
        trace = make_trace([0, 1], [0, 2], [0, 1, 3])
        renamed = replace(trace, block_ids=(trace.block_ids * 31 + 7) % 101 - 50)
        assert statistics(renamed) == statistics(trace)

    def test_no_sharing_no_hits(self, make_trace):
        """Without sharing nothing can hit and there are no gaps to report."""
        numbers = statistics(make_trace([0, 1], [2]))
        assert (numbers.ideal_block_hit_rate, numbers.ideal_token_hit_rate) == (0, 0)
        assert numbers.mean_reuse_gap_s is None
        assert numbers.single_use_share == 1

    def test_token_hits_never_exceed_the_prompt(self, make_trace):
        """A reused last block that is only partly full counts only the tokens in it."""
        trace = replace(make_trace([0, 1], [0, 1]), input_tokens=np.array([5, 5]))
        assert statistics(trace).ideal_token_hit_rate == 0.5


class TestEdges:
    def test_one_request(self, make_trace):
        """A single request has no rate and no gaps, and says so with None."""
        numbers = statistics(make_trace([0]))
        assert (numbers.duration_s, numbers.requests_per_s, numbers.interarrival_cv) == (0, None, None)

    def test_no_output(self, make_trace):
        """Where no request has output there is no mean ratio."""
        trace = make_trace([0], [1])
        numbers = statistics(replace(trace, output_tokens=np.zeros(2, np.int64)))
        assert numbers.mean_input_output_ratio is None

    def test_nothing(self, make_trace):
        """An empty trace has no statistics."""
        with pytest.raises(ValueError, match="no requests"):
            statistics(make_trace([0]).head(0))

    def test_documented_fields(self):
        """The fields that scripts rely on are there."""
        names = {field.name for field in fields(TraceStatistics)}
        assert names >= {"requests", "mean_input_tokens", "mean_output_tokens", "duration_s", "blocks"}
        assert names >= {"unique_blocks", "ideal_block_hit_rate"}

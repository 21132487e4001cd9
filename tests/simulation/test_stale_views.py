"""The Conductor on old news: views are a snapshot for as long as the knob says."""

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import LoadBalance
from mooncake_lab.core import Placed, Request, TracedRequest
from mooncake_lab.metrics import check_log
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import Cluster, Failure, SimulationOptions

MODEL = LatencyModel(
    name="by hand",
    shape=model_shape("llama3-70b"),
    prefill=PrefillLatency(constant_s=1.0, per_token_s=0.0, per_token_squared_s=0.0),
    decode=DecodeLatency(0.02, 0.0, 0.0),
    hybrid=HybridLatency(floor_s=0.02, per_token_s=0.0, per_token_squared_s=0.0, per_context_token_s=0.0),
    transfer=LinkLatency(1e15),
    dram=LinkLatency(1e15),
)


def arriving(*times_s):
    return [
        TracedRequest(Request(id=i, arrival_s=at_s, input_tokens=100, block_keys=(i,)), 2)
        for i, at_s in enumerate(times_s)
    ]


def where(cluster, requests):
    log = cluster.run(requests)
    assert check_log(log) == ()
    return [record.prefill_instance for record in log if isinstance(record, Placed)]


def disaggregated(**options):
    spec = ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=2, placement=LoadBalance())
    return Cluster(spec, MODEL, SimulationOptions(**options))


class TestOldViews:
    def test_everybody_runs_where_there_was_nothing_to_do(self):
        """Until a snapshot is too old all decide on it: a herd; the next decision takes a new one."""
        chosen = where(disaggregated(view_age_s=0.5), arriving(0.0, 0.1, 0.5, 0.6, 0.7))
        assert chosen == ["prefill-0"] * 3 + ["prefill-1"] * 2

    def test_the_dead_are_not_read_about(self):
        """A death is known at once, however old views may be: nobody is placed on a dead instance."""
        chosen = where(
            disaggregated(view_age_s=100.0, failures=(Failure("prefill-0", 0.25),)), arriving(0.0, 0.2, 0.3)
        )
        assert chosen == ["prefill-0"] * 2 + ["prefill-1"] * 3  # two are placed again

    def test_views_of_coupled_instances_are_as_old(self):
        """The knob is one of both clusters."""
        spread, herd = (
            where(
                Cluster(ClusterSpec.coupled(nodes=2), MODEL, SimulationOptions(view_age_s=age_s)),
                arriving(0.0, 0.1, 0.2, 0.3),
            )
            for age_s in (0.0, 1.0)
        )
        assert spread == ["coupled-0", "coupled-1"] * 2
        assert herd == ["coupled-0"] * 4

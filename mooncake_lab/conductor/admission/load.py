"""Load as arXiv §7.1 defines it: a predicted latency divided by its limit. A load of one is full."""

from mooncake_lab.conductor.decision import Placement, Rejection
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.view import ClusterView, DecodeView
from mooncake_lab.core import SLO, Request


def prefill_load(proposed: Placement, slo: SLO) -> float:
    """Load of the prefill pool for this request: its predicted TTFT on the best instance, divided by the limit."""
    return proposed.expected_ttft_s / slo.ttft_s


def decode_load(decode: DecodeView, estimate: Estimator, slo: SLO, *, joining: Request | None = None) -> float:
    """Load of one decode instance: the predicted TBT of the requests that are present, divided by the limit.

    Args:
        decode: the instance; requests on their way to it do not count.
        estimate: the Conductor's latency estimates.
        slo: the limits.
        joining: a request that counts as present.
    """
    requests, tokens = decode.present_requests, decode.present_tokens
    if joining is not None:
        requests, tokens = requests + 1, tokens + joining.input_tokens
    return estimate.decode_step_s(requests, tokens) / slo.tbt_s


def decode_pool_load(
    request: Request, view: ClusterView, estimate: Estimator, slo: SLO, *, with_coming: bool = False
) -> float:
    """Load of the decode pool if this request decoded now: the mean over the instances (assumption B24).

    The time of a step is linear in requests and context, so the mean over instances is that of the mean instance.

    Args:
        request: counts as present.
        view: the cluster.
        estimate: the Conductor's latency estimates.
        slo: the limits.
        with_coming: whether requests that are placed but not yet prefilled count as present.
    """
    requests, tokens = 1, request.input_tokens
    for each in view.decode:
        requests += each.requests if with_coming else each.present_requests
        tokens += each.context_tokens if with_coming else each.present_tokens
    instances = len(view.decode)
    return estimate.decode_step_s(requests / instances, tokens / instances) / slo.tbt_s


def refuse(request: Request, what: str, load: float, threshold: float) -> Rejection:
    """A rejection on arrival that names the load."""
    return Rejection(
        request_id=request.id, stage="admission", reason=f"{what} load {load:.3g} reaches {threshold:.3g}"
    )


def refuse_at_decode(
    request: Request, decode: DecodeView, estimate: Estimator, slo: SLO, threshold: float
) -> Rejection | None:
    """The decode instance's double check: a rejection if this request would fill it (arXiv §3, step 4)."""
    load = decode_load(decode, estimate, slo, joining=request)
    if load < threshold:
        return None
    return Rejection(
        request_id=request.id, stage="decode", reason=f"load of {decode.name} {load:.3g} reaches {threshold:.3g}"
    )

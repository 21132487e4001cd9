"""A log of iterations as one line per request, and what request-level batching wastes."""

from collections.abc import Mapping, Sequence

from mooncake_lab.batching.plan import Plan
from mooncake_lab.batching.replay import Iteration


def gantt(log: Sequence[Iteration]) -> dict[int, str]:
    """One string per request, one letter per iteration (Sarathi-Serve, OSDI'24, Fig. 7).

    `p` is a piece of a prompt, and `P` the last piece, which gives the first token. `d` is a decode. A running
    request without tokens is `.`, a preempted one `x`, a waiting one `w`, and a refused one `r`. A space means
    that the request is not present.
    """
    ids = {request.request_id for step in log for request in (*step.waiting, *step.running)}
    return {request_id: "".join(_letter(step, request_id) for step in log) for request_id in sorted(ids)}


def _letter(step: Iteration, request_id: int) -> str:
    for segment in step.plan.segments:
        if segment.request_id == request_id:
            return "d" if segment.kind == "decode" else "P" if segment.emits else "p"
    if request_id in step.plan.preempted or request_id in step.plan.swapped:
        return "x"
    if any(refusal.request_id == request_id for refusal in step.plan.rejected):
        return "r"
    if any(request.request_id == request_id for request in step.running):
        return "."
    return "w" if any(request.request_id == request_id for request in step.waiting) else " "


def padding_waste(plan: Plan) -> float:
    """The part of a rectangular prefill batch that is padding: 1 - sum(P) / (B * max(P)); 0 without prefill."""
    prompts = [segment.new_tokens for segment in plan.prefills]
    return 1 - sum(prompts) / (len(prompts) * max(prompts)) if prompts else 0.0


def tail_waste(decode_steps: Mapping[int, int]) -> float:
    """The part of a batch's decode places that stay empty until the batch drains: 1 - sum(D) / (B * max(D)).

    Args:
        decode_steps: decode iterations of each request of one batch; without any there is no waste.
    """
    steps = decode_steps.values()
    return 1 - sum(steps) / (len(steps) * max(steps)) if any(steps) else 0.0

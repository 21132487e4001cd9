"""What follows when an order cannot be sent to its worker."""

from mooncake_lab.cluster import Event, events


def unsent(command: events.PrepareDecode | events.RunPrefill, error: Exception, now_s: float) -> list[Event]:
    """The events that end an attempt of which no worker learned, and free what was reserved for it."""
    found: list[Event] = []
    attempt = command.attempt
    if isinstance(command, events.RunPrefill):
        placement = command.placement
        if placement.fetch_from is not None:
            found.append(
                events.PrefixFetched(
                    at_s=now_s,
                    attempt=attempt,
                    instance=placement.prefill,
                    source=placement.fetch_from,
                    start_s=now_s,
                    bytes=0,
                )
            )
        found.append(events.PrefillDropped(at_s=now_s, attempt=attempt, instance=placement.prefill))
    reason = f"the request cannot be served: {error!r}"
    return [*found, events.AttemptFailed(at_s=now_s, attempt=attempt, reason=reason, retriable=False)]

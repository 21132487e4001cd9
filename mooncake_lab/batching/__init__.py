"""What an instance runs next: one pure policy a file, one plan an iteration."""

from mooncake_lab.batching.plan import BatchingPolicy, Limits, Plan, Progress, Refusal, Segment, SegmentKind

__all__ = ["BatchingPolicy", "Limits", "Plan", "Progress", "Refusal", "Segment", "SegmentKind"]

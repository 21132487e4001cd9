"""What an engine refuses before it is made: each message names the field, its value, and what is allowed."""

import pytest

from mooncake_lab.engine import EngineSettings

LIMITS = ("block_size_tokens", "cache_blocks", "max_batch_tokens", "max_requests", "max_request_tokens")


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_below_one_is_refused_by_its_name(name):
    """One of each is the least."""
    assert getattr(EngineSettings(**{name: 1}), name) == 1
    with pytest.raises(ValueError, match=rf"^EngineSettings\.{name} is 0; at least 1 is needed$"):
        EngineSettings(**{name: 0})

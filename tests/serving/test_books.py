"""What the live cluster believes of its workers."""

import time

from mooncake_lab.serving.books import Account
from mooncake_lab.serving.messages import Job


def test_a_backlog_is_an_exact_sum():
    """The same prompts in another order are the same backlog to the last bit, and no prompts are none."""
    backlogs_s = []
    for believed_s in ((0.1, 0.2, 0.3), (0.1, 0.3, 0.2), (0.3, 0.2, 0.1)):
        account = Account(name="prefill-0", role="prefill", capacity_tokens=0, membership=None)
        for ticket, seconds in enumerate(believed_s):
            account.add_prompt(Job(ticket, 1), seconds)
        account.first_since_s = time.monotonic()
        backlogs_s.append(account.backlog_s(account.first_since_s))
        for ticket in range(3):
            account.drop_prompt(Job(ticket, 1))
        assert account.backlog_s(time.monotonic()) == 0.0
    assert len(set(backlogs_s)) == 1

"""vLLM's schedulers without draft tokens.

`extract_hidden_states` poses as a speculative method whose draft is the last token once more. Scheduling that draft doubles the
work of every decoding step, and on CPU (vLLM 0.32) verifying it is wrong when sampling: answers repeat tokens a hundred times too
often. Nothing needs these drafts, so they are never scheduled and answers come from the plain sampler.
"""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class NoDrafts(Scheduler):
    def update_draft_token_ids(self, draft_token_ids) -> None:
        pass


class NoDraftsAsync(AsyncScheduler):
    def _update_after_schedule(self, scheduler_output) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            self.requests[request_id].spec_token_ids = []  # placeholders for drafts that the worker would fill in

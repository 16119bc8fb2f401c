"""One response under way, joined from the parts that the server generated between publications."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stretto.engines.base import EngineError
from stretto.engines.server.dialect import Answer, Part
from stretto.engines.stopping import StopRule
from stretto.types import Completion, FinishReason, Request, Version, VersionSpan


@dataclass(eq=False)
class Sample:
    """Sample `index` of a request; `stop_ids` end it (end of sequence and the request's own)."""

    request: Request
    index: int
    stop_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def part(self, id: str) -> Part:
        """What to ask of the server for the rest of it."""
        sampling = self.request.sampling
        return Part(
            id=id,
            prompt_ids=(*self.request.prompt_ids, *self.ids),
            position=len(self.ids),
            max_new_tokens=sampling.max_new_tokens - len(self.ids),
            seed=self.request.seeds[self.index],
            sampling=sampling,
            stop_ids=self.stop_ids,
        )

    def add(self, part: Part, answer: Answer, version: Version, rule: StopRule) -> FinishReason:
        """Append what `version` generated; returns why it ended. EngineError when the answer contradicts itself."""
        if wrong := self._contradiction(part, answer):
            raise EngineError(f"request {self.request.id}: the server's answer ({answer.why}) {wrong}")
        begin = len(self.ids)
        self.ids += answer.ids
        self.logprobs += answer.logprobs
        reason = answer.reason
        if reason is FinishReason.LENGTH:  # a server may not look at the last allowed token any more
            reason = rule.reason(self.ids, self.request.sampling) or reason
        if begin and self.request.sampling.stop and self._cut_behind_joint(begin, rule):
            reason = FinishReason.STOP
        if len(self.ids) > begin:
            if self.spans and self.spans[-1].version == version:
                begin = self.spans.pop().start
            self.spans.append(VersionSpan(version, begin, len(self.ids)))
        return reason

    def completion(self, reason: FinishReason) -> Completion:
        """What the contract reports."""
        return Completion(
            request_id=self.request.id,
            index=self.index,
            seed=self.request.seeds[self.index],
            response_ids=tuple(self.ids),
            logprobs_T=tuple(self.logprobs),
            finish_reason=reason,
            version_spans=tuple(self.spans),
        )

    def _contradiction(self, part: Part, answer: Answer) -> str | None:
        count = len(answer.ids)
        if count != len(answer.logprobs):
            return f"has {count} tokens and {len(answer.logprobs)} log-probs"
        if not all(math.isfinite(one) for one in answer.logprobs):
            return "has a log-prob that is not finite: the model's weights or its activations overflowed"
        if count > part.max_new_tokens:
            return f"has {count} tokens, where {part.max_new_tokens} were asked for"
        if answer.reason is FinishReason.LENGTH and count != part.max_new_tokens:
            return f"ended at {count} tokens, where {part.max_new_tokens} were asked for"
        if answer.reason is FinishReason.STOP and not self._may_stop(answer):
            return "ended without an end-of-sequence id, a stop id or a stop string"
        return None

    def _may_stop(self, answer: Answer) -> bool:
        return bool(answer.ids) and (bool(self.request.sampling.stop) or answer.ids[-1] in self.stop_ids)

    def _cut_behind_joint(self, begin: int, rule: StopRule) -> bool:
        """End at a stop string that began in the part before: the server sees such a one only as prompt.

        In a part of its own the server looks for stop strings after every token, as the rule does.
        """
        longest = 4 * max(map(len, self.request.sampling.stop))  # a token spans at least a byte, a character up to four
        for length in range(begin + 1, min(len(self.ids), begin + longest) + 1):
            if rule.reason(self.ids[:length], self.request.sampling) is FinishReason.STOP:
                del self.ids[length:], self.logprobs[length:]
                return True
        return False

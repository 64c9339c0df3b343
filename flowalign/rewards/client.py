"""A judge behind `flowalign rewards serve`, used like any other."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from flowalign.rewards import wire
from flowalign.rewards.base import RewardSpec, Scored, check_media
from flowalign.rewards.delivery import Delivery, Failure
from flowalign.rewards.judge import merge
from flowalign.rewards.strict_json import WireError, short
from flowalign.rewards.wire_answers import read_answer, read_spec
from flowalign.types import FlowAlignError, Metadata


@dataclass(frozen=True)
class _Packet:
    """The samples of one request."""

    rows: tuple[int, ...]
    number: str


class RemoteReward:
    """The judge ``name`` of one or several reward servers.

    Its spec is the server's own, but without a gradient, which does not travel. Media travel in 8 bits unless
    ``exact``, as saved pictures are: what was made by dividing bytes by 255 has the very score that it would have here;
    other media are rounded first. Every answer is checked: it belongs to the request, comes from the judge that was
    announced, and has as many scores as there are samples. A sample whose request failed for good is nan, and its
    details name server and failure.

    Behind a `Judge`, a call has at most its ``batch_size`` samples: requests go out side by side where that is larger
    than ``chunk``.

    Args:
        urls: where servers listen, such as "http://127.0.0.1:8000"; each request goes to the one with the fewest under
            way, and to another where one fails.
        name: of the judge, as the servers call it.
        token_env: name of the environment variable with the servers' token; the token itself is in no recipe.
        timeout: seconds that a call may take in all.
        retries: most repetitions of a request that failed: no connection, an answer that broke off, is of another
            request or judge or has other faults, or a status of 500 and above. A busy server (429) is asked again
            until the call's time is over.
        max_in_flight: most requests under way.
        chunk: most samples of a request; fewer where their media would be more than the server takes.
        exact: media travel as float32, which is four times as much.
        digest: of the judge that must be served; None = the one that is.
        device: not used; the servers have theirs.

    Raises:
        FlowAlignError: httpx is missing, an argument is wrong, no server answers, or one does not serve this judge.
    """

    spec: RewardSpec

    def __init__(
        self,
        urls: Sequence[str] | str,
        name: str,
        token_env: str | None = None,
        timeout: float = 60.0,
        retries: int = 4,
        max_in_flight: int = 8,
        chunk: int = 16,
        exact: bool = False,
        digest: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name, self.chunk, self.exact = name, chunk, exact
        self._label = f"remote reward {name!r}"
        self.urls = self._checked_urls([urls] if isinstance(urls, str) else urls)
        for what, value, least in (("retries", retries, 0), ("max_in_flight", max_in_flight, 1), ("chunk", chunk, 1)):
            if not isinstance(value, int) or value < least:
                raise FlowAlignError(f"{self._label}: {what} {value!r}, expected a whole number of at least {least}")
        if not timeout > 0:
            raise FlowAlignError(f"{self._label}: timeout {timeout!r}, expected seconds above 0")
        token = None if token_env is None else os.environ.get(token_env, "")
        if token is not None and not re.fullmatch("[!-~]+", token):
            raise FlowAlignError(
                f"{self._label}: the environment variable {token_env} is not set, or holds other signs than those "
                "of ASCII without spaces; export the token"
            )
        try:
            self._delivery = Delivery(self.urls, token, timeout, retries, max_in_flight)
        except ImportError:
            raise FlowAlignError(f"{self._label}: needs httpx; pip install 'flowalign[server]'") from None
        spec, self.digest, self.limits = self._announced(digest)
        sent = "as float32" if exact else "rounded to 8 bits"
        # Part of the spec, so that kept scores of another judge of this name are not taken for those of this one.
        preprocess = f"sent {sent}; {spec.preprocess}; served as {self.digest[:16]}"
        self.spec = replace(spec, differentiable=False, preprocess=preprocess)

    def _checked_urls(self, urls: Sequence[str]) -> list[str]:
        cleaned = list(dict.fromkeys(str(url).rstrip("/") for url in urls))
        if not cleaned:
            raise FlowAlignError(f"{self._label}: no url; give one such as 'http://127.0.0.1:8000'")
        for url in cleaned:
            try:
                parts = urlsplit(url)
                sound = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query
                secret = parts.username is not None or parts.password is not None
                _ = parts.port
            except ValueError:
                sound, secret = False, False
            if secret:
                raise FlowAlignError(f"{self._label}: a url holds a name or password; use token_env")
            if not sound:
                raise FlowAlignError(f"{self._label}: url {url!r}, expected one like 'http://127.0.0.1:8000'")
        return cleaned

    def _announced(self, digest: str | None) -> tuple[RewardSpec, str, wire.Limits]:
        """What the servers say of the judge; those that do not answer now are asked again with every request."""
        try:
            found = self._delivery.announcements(self._announcement)
        except Failure as failure:
            raise FlowAlignError(f"{self._label}: {failure}") from None
        for url, (_, served, _) in found.items():
            wanted = digest or next(iter(found.values()))[1]
            if served != wanted:
                raise FlowAlignError(
                    f"{self._label}: {url} serves it as {served[:16]}..., expected {wanted[:16]}...; start it with the "
                    "same weights, parameters and version everywhere"
                )
        return next(iter(found.values()))

    def _announcement(self, body: bytes) -> tuple[RewardSpec, str, wire.Limits]:
        """Spec, digest and limits out of the answer to GET /v1/rewards.

        Raises:
            WireError: it is none.
            Failure: this judge is not among them.
        """
        try:
            found = json.loads(body)
            protocol, rewards, limits = found["protocol"], found["rewards"], found["limits"]
            served = {str(one["name"]): (one["spec"], one["digest"]) for one in rewards}
            limits = wire.Limits(int(limits["body"]), int(limits["samples"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise WireError("the list of rewards cannot be read; is it a server of flowalign?") from None
        if protocol != wire.PROTOCOL:
            raise Failure(f"speaks version {protocol!r} of the protocol, expected {wire.PROTOCOL}; update one side")
        if self.name not in served:
            raise Failure(f"serves {short(', '.join(served)) or 'nothing'}, not {self.name!r}")
        spec, digest = served[self.name]
        if not isinstance(digest, str) or min(limits) < 1:
            raise WireError("the list of rewards holds no digest, or limits below 1")
        return read_spec(spec), digest, limits

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] and B prompts to B scores on the CPU; nan where a request failed.

        Raises:
            ValueError: media outside the contract.
        """
        check_media(media, prompts, self._label)
        faults = self._faults(media, prompts, metadata)
        packets = self._packets(media, prompts, metadata, faults)

        def body(packet: _Packet) -> bytes:
            rows = list(packet.rows)
            own = media[rows].detach()
            return wire.write_request(
                wire.ScoreRequest(
                    self.name,
                    own.float() if self.exact else wire.quantise(own),
                    tuple(prompts[i] for i in rows),
                    None if metadata is None else tuple(metadata[i] for i in rows),
                    packet.number,
                    self.digest,
                )
            )

        answers = self._delivery.deliver([(packet, body) for packet in packets], self._read)
        parts: list[tuple[Sequence[int], Scored]] = [([i], _invalid(1, reason)) for i, reason in faults.items()]
        for packet, answer in zip(packets, answers, strict=True):
            parts.append((packet.rows, _invalid(len(packet.rows), answer) if isinstance(answer, str) else answer))
        return merge(parts, len(prompts))

    def _faults(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None) -> dict[int, str]:
        """{sample: why it cannot be sent}: one bad sample must not cost those of its request their scores."""
        if metadata is not None and len(metadata) != len(prompts):
            raise ValueError(f"{self._label}: {len(metadata)} metadata came with {len(prompts)} prompts")
        finite = torch.isfinite(media).flatten(1).all(1).tolist()
        shape = wire.media_fault(tuple(media.shape[1:]))
        if shape is None and self._bytes(media) > self._room:
            shape = f"its media take {self._bytes(media)} bytes, and the server takes {self._room} at most"
        found = {}
        for i, prompt in enumerate(prompts):
            fault = None if finite[i] else "the media hold nan or infinity"
            fault = fault or shape or wire.sample_fault(prompt, None if metadata is None else metadata[i])
            if fault is not None:
                found[i] = fault
        return found

    @property
    def _room(self) -> int:
        """Bytes of media in a request: what its largest header leaves, or half where the server takes very little."""
        return max(self.limits.body - wire.MAX_HEADER, self.limits.body // 2)

    def _bytes(self, media: Tensor) -> int:
        """Of one sample, as it travels."""
        return media[0].numel() * (4 if self.exact else 1) if len(media) else 0

    def _packets(
        self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None, faults: Mapping[int, str]
    ) -> list[_Packet]:
        """Samples that can be sent, cut so that every request is within the server's limits.

        Samples of one prompt stay together where the judge compares them.
        """
        sendable = [i for i in range(len(prompts)) if i not in faults]
        if self.spec.scope == "groupwise":
            groups: dict[str, list[int]] = {}
            for i in sendable:
                groups.setdefault(prompts[i], []).append(i)
            return [_Packet(tuple(rows), uuid4().hex) for rows in groups.values()]
        size = self._bytes(media)
        frames = max(1, media.shape[1])
        most = min(self.chunk, self.limits.samples, wire.MAX_ALL_FRAMES // frames, self._room // max(1, size))
        packets: list[_Packet] = []
        rows: list[int] = []
        text = 0
        for i in sendable:
            own = _text_bytes(prompts[i], None if metadata is None else metadata[i])
            if rows and (len(rows) == most or text + own > min(wire.MAX_HEADER, self.limits.body // 2) // 2):
                packets.append(_Packet(tuple(rows), uuid4().hex))
                rows, text = [], 0
            rows.append(i)
            text += own
        return [*packets, _Packet(tuple(rows), uuid4().hex)] if rows else packets

    def _read(self, packet: _Packet, body: bytes) -> Scored:
        """The scores in an answer that is the right one.

        Raises:
            WireError: it is not.
        """
        answer = read_answer(body, len(packet.rows))
        if answer.request_id != packet.number:
            raise WireError(f"the answer is of request {answer.request_id[:64]!r}, not of {packet.number}")
        if answer.spec_digest != self.digest:
            raise WireError(f"the answer is of judge {answer.spec_digest[:16]!r}..., not of {self.digest[:16]}...")
        return answer.scored


def _text_bytes(prompt: str, metadata: Any) -> int:
    """An upper bound of what they take in a header: JSON within JSON has every quote and backslash escaped again."""
    text = json.dumps([prompt, metadata], default=dict, ensure_ascii=False)
    return len(text.encode()) + text.count('"') + text.count("\\") + 16


def _invalid(count: int, reason: str) -> Scored:
    return Scored(torch.full((count,), torch.nan), {}, ({"reason": reason},) * count)

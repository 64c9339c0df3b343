"""Whether a picture shows the objects, counts, colours and places that its prompt asks for; see card.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowalign.rewards.base import RewardSpec, Scored, WeightFile, check_media
from flowalign.types import FlowAlignError, Metadata
from reward_models.geneval import detectors, rules
from reward_models.geneval.mask2former import WEIGHTS

CLIP = "openai/clip-vit-large-patch14"


class GenEval:
    """Score of each picture by one of GenEval's rules; those not chosen, and the score by skill, are sub-scores.

    Args:
        rule: "soft" (partial credit, for training), "flow-grpo" (the same to the digit as Flow-GRPO's code computes
            it), "strict" (all numbers exact) or "official" (GenEval's evaluator); see `rules.Verdict`.
        detector: "mask2former", "shapes" or "module:Class" of a `detectors.Detector`.
        path: folder or hub name of the detector's weights.
        clip: folder or hub name of the CLIP that tells colours where the detector does not.
        threshold, counting_threshold: confidence from which an object counts, and that of the tag "counting".

    Raises:
        FlowAlignError: an unknown rule or detector, or weights that cannot be loaded.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="geneval",
        description="objects, counts, colours and positions that the prompt asks for",
        modality="image",
        higher_is_better=True,
        native_range=(2.0 - rules.MAX_PER_CLASS, 1.0),  # one object asked for, sixteen found
        differentiable=False,
        needs=("metadata",),
        preprocess="bytes; shortest side to 800 and longest to at most 1333, bilinear (mask2former); crops on grey "
        "for CLIP; none (shapes)",
        weights=(WeightFile(WEIGHTS, "model.safetensors"), WeightFile(CLIP, "model.safetensors")),
        licence="MIT (GenEval, CLIP, Mask2Former's code); the hub calls the licence of Mask2Former's weights 'other'",
        citation="Ghosh et al., GenEval, arXiv 2310.11513; the soft rule: Flow-GRPO, arXiv 2505.05470",
        verified="rules: exact; shapes detector: exact; mask2former: tiny random weights, not yet verified on real "
        "weights",
    )

    def __init__(
        self,
        rule: str = "soft",
        detector: str = "mask2former",
        path: str | None = None,
        clip: str = CLIP,
        threshold: float = rules.THRESHOLD,
        counting_threshold: float = rules.COUNTING_THRESHOLD,
        device: torch.device | str = "cpu",
    ) -> None:
        if rule not in rules.RULES:
            raise FlowAlignError(f"reward 'geneval': rule {rule!r}, expected one of {', '.join(rules.RULES)}")
        self.rule, self.threshold, self.counting_threshold = rule, threshold, counting_threshold
        self.detector = detectors.load(detector, path, device, min(threshold, counting_threshold), "geneval")
        self.classifier: detectors.ColourClassifier | None = None
        self.colours: Sequence[str] = self.detector.colours or ()
        if self.detector.colours is None:
            self.classifier = detectors.CLIPColours(clip, device, "geneval")
            self.colours = self.classifier.colours

    def to(self, device: torch.device | str) -> None:
        """Moves the weights of detector and classifier, where they have any."""
        for part in (self.detector, self.classifier):
            move = getattr(part, "to", None)
            if move is not None:
                move(device)

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] and B prompts to B scores, of several frames the mean.

        nan where the prompt has no GenEval metadata or asks for what cannot be told; with the detector "shapes" a
        caption of that world is enough.
        """
        check_media(media, prompts, "geneval")
        asked = [self._request(text, None if metadata is None else metadata[i]) for i, text in enumerate(prompts)]
        todo = [i for i, one in enumerate(asked) if isinstance(one, rules.Request)]
        frames = media.shape[1]
        found = self.detector(media[todo].flatten(0, 1)) if todo else []
        columns = {name: torch.full((len(prompts),), torch.nan) for name in (*rules.RULES, *rules.TAGS)}
        details: list[Mapping[str, Any]] = [{"reason": one} if isinstance(one, str) else {} for one in asked]
        for position, i in enumerate(todo):
            request = asked[i]
            assert isinstance(request, rules.Request)
            seen = found[position * frames : (position + 1) * frames]
            kept = [self._kept(media[i, k], one, request) for k, one in enumerate(seen)]
            verdicts = [rules.judge(request, one) for one in kept]
            for name in rules.RULES:
                columns[name][i] = sum(verdict.by(name) for verdict in verdicts) / frames
            columns[request.tag][i] = columns[self.rule][i]
            details[i] = {
                "found": [{label: len(objects) for label, objects in one.items()} for one in kept],
                "wrong": [text for verdict in verdicts for text in verdict.wrong],
            }
        score = columns.pop(self.rule)
        return Scored(score, columns, tuple(details))

    def _request(self, prompt: str, metadata: Metadata | None) -> rules.Request | str:
        """What a prompt asks for, or why it cannot be judged."""
        derive = getattr(self.detector, "metadata", None)
        try:
            if derive is not None and (not metadata or "include" not in metadata):
                metadata = derive(prompt)
            return rules.read(metadata, self.detector.labels, self.colours)
        except ValueError as error:
            return str(error)

    def _kept(
        self, picture: Tensor, found: Sequence[rules.Detection], request: rules.Request
    ) -> dict[str, list[rules.Detection]]:
        """The objects that count, with colours where the request asks for them."""
        kept = rules.keep(found, request.tag, self.threshold, self.counting_threshold)
        asked = {clause.label for clause in request.include if clause.colour is not None}
        if self.classifier is None or not asked:
            return kept
        return {
            label: detectors.coloured(picture, objects, self.classifier) if label in asked else objects
            for label, objects in kept.items()
        }

"""GenEval's detectors: the real loading code on tiny random weights, against independent computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torchvision import transforms
from transformers import (
    CLIPImageProcessor,
    CLIPModel,
    CLIPTokenizer,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessor,
    SwinConfig,
)

from flowalign.data.worlds import shapes, shapes_render
from flowalign.rewards.judge import Judge
from flowalign.types import FlowAlignError
from reward_models.geneval.detectors import COLOURS, CLIPColours
from reward_models.geneval.mask2former import Mask2Former, instances
from reward_models.geneval.reward import GenEval
from reward_models.geneval.rules import Detection
from reward_models.geneval.shapes_detector import ShapesDetector

NAMES = ("mouse", "sofa", "cat")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a Mask2Former of three classes, sharpened so that some objects are sure and others are not."""
    folder = tmp_path_factory.mktemp("mask2former")
    swin = SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    small = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_attention_heads": 2}
    config = Mask2FormerConfig(
        backbone_config=swin,
        **small,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        encoder_layers=1,
        decoder_layers=2,
        num_queries=12,
        id2label=dict(enumerate(NAMES)),
        label2id={name: i for i, name in enumerate(NAMES)},
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Mask2FormerForUniversalSegmentation(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "queries" in name:
                    parameter.mul_(4)
                elif "class_predictor" in name:
                    parameter.copy_(torch.randn_like(parameter))
                elif "mask_embedder" in name or "mask_projection" in name:
                    parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.ndim > 1 else 0.0))
    model.save_pretrained(folder)
    Mask2FormerImageProcessor(size={"shortest_edge": 64, "longest_edge": 106}).save_pretrained(folder)
    return folder


def pictures(n=3, height=48, width=80):
    y, x = np.mgrid[0:height, 0:width] / 9
    stack = [np.stack([np.sin(x * (c + 1) + i) * np.cos(y * (1 + i / 2)) for c in range(3)]) for i in range(n)]
    return (torch.tensor(np.array(stack)).float() * 0.5 + 0.5).clamp(0, 1)


def bilinear(array, rows, columns):
    """Half-pixel bilinear resampling by linear interpolation along each axis, edges held."""
    for axis, count in ((0, rows), (1, columns)):
        size = array.shape[axis]
        centres = np.clip((np.arange(count) + 0.5) * size / count - 0.5, 0, size - 1)
        low = np.floor(centres).astype(int)
        high, share = np.minimum(low + 1, size - 1), centres - low
        share = share[:, None] if axis == 0 else share[None]
        array = np.take(array, low, axis) * (1 - share) + np.take(array, high, axis) * share
    return array


def expected_instances(classes, masks, padded, resized, original, labels, floor):
    """In numpy and pair by pair: class probability times mean mask probability inside the mask."""
    exponents = np.exp(classes - classes.max(1, keepdims=True))
    probabilities = exponents / exponents.sum(1, keepdims=True)
    pairs = [(probabilities[q, c], q, c) for q in range(classes.shape[0]) for c in range(classes.shape[1] - 1)]
    found = []
    for probability, q, c in sorted(pairs, reverse=True)[:100]:
        logits = bilinear(bilinear(masks[q], *padded)[: resized[0], : resized[1]], *original)
        inside = logits > 0
        if not inside.any():
            continue
        score = probability * (1 / (1 + np.exp(-logits[inside]))).mean()
        if score > floor:
            rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
            box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            found.append((labels[c], score, box, inside))
    return sorted(found, key=lambda one: -one[1])


def same(found: list[Detection], expected) -> None:
    assert [one.label for one in found] == [label for label, *_ in expected]
    for one, (_, score, box, inside) in zip(found, expected, strict=True):
        assert one.score == pytest.approx(score, abs=2e-4)
        assert one.mask is not None and (one.mask != inside).mean() < 1e-3  # float32 against float64 at the edge
        assert one.box == pytest.approx(box, abs=1)


def test_the_objects_of_a_tiny_model_are_those_of_an_independent_computation(tiny) -> None:
    media = pictures()
    detector = Mask2Former(str(tiny), floor=0.3)
    found = detector(media)
    assert detector.labels == ("computer mouse", "couch", "cat")
    model = Mask2FormerForUniversalSegmentation.from_pretrained(tiny).eval()
    processor = Mask2FormerImageProcessor.from_pretrained(tiny)
    drawn = [Image.fromarray((p.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)) for p in media]
    total = 0
    for picture, objects in zip(drawn, found, strict=True):
        inputs = processor(images=[picture], return_tensors="pt")
        with torch.no_grad():
            outputs = model(**inputs)
        size = tuple(inputs["pixel_values"].shape[-2:])
        logits = outputs.class_queries_logits[0].double().numpy(), outputs.masks_queries_logits[0].double().numpy()
        expected = expected_instances(*logits, size, size, (48, 80), detector.labels, 0.3)
        same(objects, expected)
        total += len(objects)
    assert 3 <= total < 3 * 36, "the floor must keep some objects and drop others"
    assert len({one.label for objects in found for one in objects}) > 1


def test_masks_are_cut_to_the_picture_inside_the_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    classes = 3 * torch.randn(9, 4, generator=generator)
    masks = torch.nn.functional.interpolate(
        4 * torch.randn(1, 9, 4, 5, generator=generator), (16, 20), mode="bicubic", align_corners=False
    )[0]
    sizes = ((64, 80), (50, 70), (33, 45))
    found = instances(classes, masks, sizes, NAMES, 0.2)
    expected = expected_instances(classes.double().numpy(), masks.double().numpy(), *sizes, NAMES, 0.2)
    assert len(found) >= 4
    same(found, expected)
    assert all(one.mask is not None and one.mask.shape == (33, 45) for one in found)


def test_objects_do_not_depend_on_the_batch(tiny) -> None:
    media = pictures()
    detector = Mask2Former(str(tiny), floor=0.3)
    together = detector(media)
    for i, objects in enumerate(together):
        (single,) = detector(media[i : i + 1])
        assert [one.label for one in single] == [one.label for one in objects]
        assert [one.score for one in single] == pytest.approx([one.score for one in objects], abs=1e-5)
        assert [one.box for one in single] == [one.box for one in objects]


def test_the_whole_judge_runs_on_weights(tiny, weights) -> None:
    reward = GenEval("soft", path=str(tiny), clip=str(weights), threshold=0.35)
    media = pictures()[:, None]
    found = Mask2Former(str(tiny), floor=0.35)(media[:, 0])
    metadata = [{"tag": "single_object", "include": [{"class": name, "count": 1}]} for name in reward.detector.labels]
    judge = Judge(reward)
    scored = judge(media, ["", "", ""], metadata)
    counts = [sum(one.label == name for one in found[i]) for i, name in enumerate(reward.detector.labels)]
    assert scored.score.tolist() == [1 - abs(1 - count) for count in counts]
    colours = CLIPColours(str(weights), "cpu", "geneval")
    with_colour, expected = [], []
    for i, (one, count) in enumerate(zip(metadata, counts, strict=True)):
        label = one["include"][0]["class"]
        told = colours(media[i, 0], [d for d in found[i] if d.label == label])
        asked = told[0] if told else "red"
        clause = {"class": label, "count": max(1, count), "color": asked}
        with_colour.append({"tag": "colors", "include": [clause]})
        expected.append((1 + told.count(asked) / count) / 2 if count else 0.0)
    assert max(expected) > 0.5
    again = judge(media, ["", "", ""], with_colour)
    assert again.score.tolist() == pytest.approx(expected)
    single = torch.cat([judge(media[i : i + 1], [""], with_colour[i : i + 1]).score for i in range(3)])
    assert torch.equal(again.score, single)
    assert not any(
        p.requires_grad for p in [*reward.detector.model.parameters(), *reward.classifier.clip.model.parameters()]
    )


def test_a_colour_is_the_nearest_of_thirty_sentences_to_the_object_on_grey(weights) -> None:
    picture = pictures(1, 60, 70)[0]
    inside = np.zeros((60, 70), bool)
    inside[12:41, 20:51] = True
    inside[12:20, 20:30] = False
    boxes = [(20, 12, 51, 41), (0, 0, 70, 60), (5, 30, 30, 58)]
    masks = [inside, None, None]
    found = [Detection("cat", 0.9, box, mask) for box, mask in zip(boxes, masks, strict=True)]
    classifier = CLIPColours(str(weights), "cpu", "geneval")
    told = classifier(picture, found)
    model, tokenizer = CLIPModel.from_pretrained(weights).eval(), CLIPTokenizer.from_pretrained(weights)
    processor = CLIPImageProcessor.from_pretrained(weights)
    drawn = Image.fromarray((picture.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
    blank = Image.new("RGB", drawn.size, "#999")
    crops = [
        (drawn if mask is None else Image.composite(drawn, blank, Image.fromarray(mask))).crop(box)
        for box, mask in zip(boxes, masks, strict=True)
    ]
    sentences = ("a photo of a {} cat", "a photo of a {}-colored cat", "a photo of a {} object")
    # GenEval's CLIP is open_clip's, which prepares pictures with torchvision.
    steps = [transforms.Resize(32, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(32)]
    prepared = transforms.Compose([*steps, transforms.ToTensor()])
    cut = torch.stack([prepared(crop) for crop in crops])
    difference = (torch.cat([classifier._crop(picture, one) for one in found]) - cut).abs() * 255
    # They round to bytes three times, half a byte each, and we do not; another grey or a shift is 10 bytes.
    assert difference.max() <= 1.6 and difference.mean() <= 0.5
    pixels = transforms.Normalize(processor.image_mean, processor.image_std)(cut)
    with torch.no_grad():
        seen = model.get_image_features(pixel_values=pixels).pooler_output
        seen = seen / seen.norm(dim=-1, keepdim=True)
        rows = []
        for colour in COLOURS:
            texts = [sentence.format(colour) for sentence in sentences]
            tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=24, return_tensors="pt")
            said = model.get_text_features(input_ids=tokens.input_ids).pooler_output
            mean = (said / said.norm(dim=-1, keepdim=True)).mean(0)
            rows.append(mean / mean.norm())
    cosines = seen @ torch.stack(rows).T
    # Wherever the best colour leads by more than bytes and resampling can move a cosine.
    for row, colour in zip(cosines, told, strict=True):
        assert row[COLOURS.index(colour)] >= row.max() - 2e-3
    assert (cosines.amax(1) - cosines.amin(1)).min() > 1e-2, "the colours must be told apart"


def test_the_shapes_detector_sees_boxes_and_colours_as_drawn() -> None:
    names = []
    for seed, text in enumerate(["a red circle", "a blue square", "a green triangle", "a purple cross"] * 5):
        drawn = shapes_render.render(shapes.parse(text), np.random.default_rng(seed))
        ((one,),) = ShapesDetector()(torch.from_numpy(drawn).permute(2, 0, 1)[None])
        assert (one.colour, one.label) == tuple(text.split()[1:])
        rows, columns = ndimage.find_objects((np.abs(drawn - drawn[0, 0]).max(-1) > 0.15).astype(int))[0]
        # Edges are anti-aliased: the box of drawn pixels is up to a pixel larger on each side.
        assert one.box == pytest.approx((columns.start, rows.start, columns.stop, rows.stop), abs=1.6)
        names.append(one.label)
    assert set(names) == set(shapes.SHAPES)


def test_captions_of_the_shapes_world_as_metadata() -> None:
    detector = ShapesDetector()
    assert detector.metadata("three blue squares") == {
        "tag": "counting",
        "include": [{"class": "square", "count": 3, "color": "blue"}],
        "exclude": [{"class": label, "count": 1} for label in ("circle", "triangle", "cross", "unknown")],
    }
    left = detector.metadata("a red circle left of a blue square")
    assert left["tag"] == "position"
    assert left["include"] == [
        {"class": "square", "count": 1, "color": "blue"},
        {"class": "circle", "count": 1, "color": "red", "position": ["left of", 0]},
    ]
    with pytest.raises(ValueError, match="names the shape 'circle' twice"):
        detector.metadata("a red circle and a blue circle")


def test_missing_weights_give_one_sentence(tmp_path, tiny) -> None:
    for params, words in (
        ({"path": str(tmp_path / "none")}, "params.path"),
        ({"path": str(tiny), "clip": str(tmp_path / "none")}, "cannot be loaded"),
    ):
        with pytest.raises(FlowAlignError, match=words) as caught:
            GenEval(**params)
        assert "\n" not in str(caught.value)
    assert math.isclose(GenEval.spec.native_range[0], -14)

"""Small models from transformers, timm, torchvision and peft, with random weights.

Every case is a function without arguments that returns the model, a batch (a mapping of tensors,
examples first) and a function from both to one loss for each example.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import peft
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

N, T, VOCABULARY, CLASSES = 5, 7, 60, 3
Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
Parts = tuple[nn.Module, dict[str, Tensor], Loss]


@dataclass(frozen=True)
class Case:
    """One model. ``refused`` is what the refusal must say, if there must be one; ``tol`` what the
    sums may be off by, relative to their largest entry; ``seeded`` says that the model is random,
    so that it is compared with itself."""

    make: Callable[[], Parts]
    group: str
    refused: str = ""
    tol: float = 1e-10
    seeded: bool = False


CASES: dict[str, Case] = {}


def add(name: str, group: str, make: Callable[[], Parts], **options: Any) -> None:
    """Add a case to the matrix."""
    assert name not in CASES
    CASES[name] = Case(make, group, **options)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(length: int = T, examples: int = N) -> Tensor:
    return torch.randint(3, VOCABULARY, (examples, length), generator=_generator(1))


def mask(length: int = T, examples: int = N) -> Tensor:
    ends = length - torch.arange(examples) % 3
    return (torch.arange(length) < ends[:, None]).long()


def pictures(side: int = 32) -> Tensor:
    return torch.randn(N, 3, side, side, generator=_generator(2), dtype=torch.float64)


def classes() -> Tensor:
    return torch.arange(N) % CLASSES


def _scores(out: Any) -> Tensor:
    scores = out if isinstance(out, Tensor) else out.logits if hasattr(out, "logits") else out[0]
    assert isinstance(scores, Tensor)
    return scores


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of a classification."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    scores = _scores(model(inputs["x"]) if "x" in inputs else model(**inputs))
    return F.cross_entropy(scores, batch["labels"], reduction="none")


def predict(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the next token, averaged within the example over tokens that count."""
    scores = _scores(model(**batch))[:, -batch["input_ids"].shape[1] :]
    each = F.cross_entropy(scores[:, :-1].mT, batch["input_ids"][:, 1:], reduction="none")
    counts = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[:, 1:]
    return (each * counts).sum(1) / counts.sum(1)


def translate(model: nn.Module, batch: Batch) -> Tensor:
    scores = _scores(model(**batch))
    return F.cross_entropy(scores.mT, batch["decoder_input_ids"], reduction="none").mean(1)


# ------------------------------------------------------------------------------- transformers
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 40, "max_position_embeddings": 24,
}  # fmt: skip
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}
DECODER = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2}
GPT = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40, "max_position_embeddings": 24, "dropout": 0.0,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2,
    "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
PICTURE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "image_size": 32, "patch_size": 8, **QUIET,
}  # fmt: skip
SOUND = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40,
    "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "conv_dim": (8, 8),
    "conv_stride": (4, 2), "conv_kernel": (8, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "classifier_proj_size": 16, "num_labels": CLASSES,
}  # fmt: skip


def texts(length: int = T) -> dict[str, Tensor]:
    return {"input_ids": tokens(length), "attention_mask": mask(length)}


def labelled(length: int = T) -> dict[str, Tensor]:
    return {**texts(length), "labels": classes()}


def pairs(length: int = T) -> dict[str, Tensor]:
    return {**texts(length), "decoder_input_ids": tokens(max(5, length - 1))}


def seen() -> dict[str, Tensor]:
    return {"pixel_values": pictures(), "labels": classes()}


def heard() -> dict[str, Tensor]:
    waves = torch.randn(N, 160, generator=_generator(3), dtype=torch.float64)
    return {"input_values": waves, "labels": classes()}


def hugging(
    kind: str,
    config: str,
    options: dict[str, Any],
    batch: Callable[[], dict[str, Tensor]],
    loss: Loss,
    dtype: torch.dtype = torch.float64,
) -> Parts:
    """A model of transformers, made from a configuration."""
    model = getattr(transformers, kind)(getattr(transformers, config)(**options)).to(dtype)
    return model.train(), batch(), loss


def hub(name: str, prefix: str, head: str, *rest: Any, **options: Any) -> None:
    dtype = options.pop("dtype", torch.float64)
    make: Callable[..., Parts] = functools.partial(hugging, prefix + head, prefix + "Config")
    make = functools.partial(make, *rest, dtype=dtype)
    add(name, "transformers", make, **options)


CLASSIFIER, CAUSAL, SEEN = "ForSequenceClassification", "ForCausalLM", "ForImageClassification"
GENERATION = "ForConditionalGeneration"
BERT = {**TEXT, **QUIET}
DEBERTA = {
    **BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4,
    "norm_rel_ebd": "layer_norm", "share_att_key": True, "pooler_hidden_size": 32,
    "pooler_dropout": 0.0, "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
short = functools.partial(labelled, N)

hub("BERT", "Bert", CLASSIFIER, BERT, labelled, classify)
hub("BERT, N = T", "Bert", CLASSIFIER, BERT, short, classify)
hub("BERT, masked words", "Bert", "ForMaskedLM", BERT, texts, predict)
hub("RoBERTa", "Roberta", CLASSIFIER, {**BERT, "pad_token_id": 1}, labelled, classify)
hub(
    "ALBERT",
    "Albert",
    CLASSIFIER,
    {**BERT, "embedding_size": 24, "classifier_dropout_prob": 0.0},
    labelled,
    classify,
)
hub("DeBERTa v2", "DebertaV2", CLASSIFIER, DEBERTA, labelled, classify)
hub("GPT-2", "GPT2", "LMHeadModel", GPT, texts, predict)
hub("GPT-2, N = T", "GPT2", "LMHeadModel", GPT, functools.partial(texts, N), predict)
hub("Llama", "Llama", CAUSAL, DECODER, texts, predict, tol=1e-6)
hub("Qwen 3", "Qwen3", CAUSAL, {**DECODER, "head_dim": 8}, texts, predict, tol=1e-6)
hub("Gemma 2", "Gemma2", CAUSAL, {**DECODER, "head_dim": 8}, texts, predict, tol=1e-6)
hub(
    "OPT", "OPT", CAUSAL,
    {**TEXT, "ffn_dim": 40, "dropout": 0.0, "word_embed_proj_dim": 32}, texts, predict,
)  # fmt: skip
hub(
    "Mixtral", "Mixtral", CAUSAL, {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    texts, predict, dtype=torch.float32, tol=1e-3,
)  # fmt: skip
hub(
    "GPT-OSS", "GptOss", CAUSAL,
    {**DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    texts, predict, dtype=torch.float32, tol=1e-3,
)  # fmt: skip
hub("Mamba", "Mamba", CAUSAL, {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4,
    "time_step_rank": 4, "use_cache": False,
}, lambda: {"input_ids": tokens()}, predict, tol=1e-5)  # fmt: skip
hub("T5", "T5", GENERATION, T5, pairs, translate)
hub("T5, N = T", "T5", GENERATION, T5, functools.partial(pairs, N), translate)
hub("BART", "Bart", GENERATION, SEQ2SEQ, pairs, translate)
hub("ViT", "ViT", SEEN, PICTURE, seen, classify)
hub("DINOv2", "Dinov2", SEEN, {**PICTURE, "mlp_ratio": 2}, seen, classify)
hub(
    "BEiT",
    "Beit",
    SEEN,
    {**PICTURE, "use_relative_position_bias": True, "drop_path_rate": 0.0},
    seen,
    classify,
)
hub("Swin", "Swin", SEEN, {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
    "window_size": 4, "drop_path_rate": 0.0, "num_labels": CLASSES, **QUIET,
}, seen, classify)  # fmt: skip
hub("wav2vec 2.0", "Wav2Vec2", CLASSIFIER, SOUND, heard, classify)


def found(dropout: float = 0.0, places: str = "sine", examples: int = N) -> Parts:
    """Objects found in pictures by learned queries; its BatchNorm is frozen."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], out_features=["stage1", "stage2"]
    )
    config = transformers.DetrConfig(
        d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, dropout=dropout,
        attention_dropout=dropout, num_queries=N, num_labels=CLASSES, use_timm_backbone=False,
        backbone_config=backbone, use_pretrained_backbone=False, backbone=None,
        position_embedding_type=places,
    )  # fmt: skip
    model = transformers.DetrForObjectDetection(config).double().train()
    with torch.no_grad():  # a norm of zeros, as in the first decoder layer, has no useful slope
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=_generator(5)), alpha=0.1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(**batch)
        scores, boxes = out.logits.sin().flatten(1).mean(1), out.pred_boxes.square()
        losses: Tensor = scores + boxes.flatten(1).sum(1)
        return losses

    return model, {"pixel_values": pictures()[:examples]}, loss


def told() -> Parts:
    """Texts about pictures of four pieces each, which the model gets in one long row."""
    config = transformers.Qwen2VLConfig(
        text_config={
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4,
            "spatial_merge_size": 1, "mlp_ratio": 2,
        },
        vision_start_token_id=0, image_token_id=1, video_token_id=2,
    )  # fmt: skip
    model = transformers.Qwen2VLForConditionalGeneration(config).double().train()
    text = tokens(10)
    text[:, 2], text[:, 3:7] = 0, 1
    pieces = torch.randn(N, 4, 96, generator=_generator(4), dtype=torch.float64)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids = batch["input_ids"]
        out = model(
            pixel_values=batch["pieces"].flatten(0, 1),
            image_grid_thw=torch.tensor([[1, 2, 2]]).expand(len(ids), 3),
            input_ids=ids,
            mm_token_type_ids=(ids == 1).long(),
            use_cache=False,
        )
        losses: Tensor = out.logits.sin().flatten(1).mean(1)
        return losses

    return model, {"input_ids": text, "pieces": pieces}, loss


def named() -> Parts:
    """Objects looked for in each picture by three names, as OWL-ViT does."""
    text = {**TEXT, "num_hidden_layers": 1, "eos_token_id": 2}
    config = transformers.OwlViTConfig(
        text_config=text, vision_config={**PICTURE, "num_hidden_layers": 1}, projection_dim=32
    )
    model = transformers.OwlViTForObjectDetection(config).double().train()
    names = tokens(examples=3 * N).reshape(N, 3, T)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids = batch["names"].flatten(0, 1)
        out = model(
            pixel_values=batch["pixel_values"], input_ids=ids, attention_mask=torch.ones_like(ids)
        )
        losses: Tensor = out.logits.sin().flatten(1).sum(1) + out.pred_boxes.flatten(1).sum(1)
        return losses

    return moved(model), {"pixel_values": pictures(), "names": names}, loss


add("OWL-ViT, three names for each picture", "transformers", named)
add("DETR", "transformers", found)
add("DETR, learned positions, N = rows", "transformers",
    functools.partial(found, places="learned", examples=4))  # fmt: skip
add("Qwen 2-VL, pictures in pieces", "transformers", told, tol=1e-6)
hub("ResNet (BatchNorm)", "ResNet", SEEN, {
    "embedding_size": 8, "hidden_sizes": [8], "depths": [1], "num_labels": CLASSES,
    "layer_type": "basic",
}, seen, classify, refused="GroupNorm")  # fmt: skip


def contrast() -> Parts:
    """Every text is compared with every picture."""
    text = {**TEXT, "num_hidden_layers": 1, "eos_token_id": 2}
    vision = {**PICTURE, "num_hidden_layers": 1}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    batch = {"input_ids": tokens(), "pixel_values": pictures()}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(**batch).logits_per_text
        return F.cross_entropy(scores, torch.arange(len(scores)), reduction="none")

    return transformers.CLIPModel(config).double().train(), batch, loss


add("CLIP, contrastive loss", "transformers", contrast, refused="own example alone")


# --------------------------------------------------------------------------------------- peft
def adapted(base: str, kind: str, examples: int = N, **options: Any) -> Parts:
    """A model with an adapter, whose zeros are moved so that no gradient vanishes."""
    model, batch, loss = CASES[base].make()
    batch = {name: part[:examples] for name, part in batch.items()}
    task = "SEQ_CLS" if loss is classify else "CAUSAL_LM"
    torch.manual_seed(1)
    model = peft.get_peft_model(model, getattr(peft, kind)(task_type=task, **options)).double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad and ("lora" in name or "oft" in name):
                param.add_(0.05 * torch.randn(param.shape, generator=_generator(5)))
    return model.train(), batch, loss


LORA = {"r": 4, "lora_dropout": 0.0}
ADAPTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LoRA on BERT": ("BERT", "LoraConfig", {**LORA, "target_modules": ["query", "value"]}),
    "LoRA on all linear layers": ("BERT", "LoraConfig", {**LORA, "target_modules": "all-linear"}),
    "LoRA on GPT-2": (
        "GPT-2", "LoraConfig", {**LORA, "fan_in_fan_out": True, "target_modules": ["c_attn"]}),
    "LoRA on embeddings": (
        "Llama", "LoraConfig", {**LORA, "target_modules": ["q_proj", "embed_tokens"]}),
    "DoRA": ("Llama", "LoraConfig", {**LORA, "use_dora": True, "target_modules": ["q_proj"]}),
    "DoRA on embeddings": (
        "Llama", "LoraConfig", {**LORA, "use_dora": True, "target_modules": ["embed_tokens"]}),
    "OFT, N = blocks": ("Llama", "OFTConfig", {
        "oft_block_size": 8, "r": 0, "target_modules": ["q_proj"], "examples": 4}),
    "BOFT, N = blocks": ("Llama", "BOFTConfig", {
        "boft_block_size": 8, "target_modules": ["q_proj"], "examples": 4}),
    "AdaLoRA": ("Llama", "AdaLoraConfig", {
        "target_r": 2, "init_r": 4, "total_step": 100, "target_modules": ["q_proj"]}),
    "LoKr": ("Llama", "LoKrConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "VeRA": ("Llama", "VeraConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "IA3": ("Llama", "IA3Config", {
        "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prefix tuning": ("Llama", "PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "prompt tuning": ("BERT", "PromptTuningConfig", {"num_virtual_tokens": 3}),
    "p-tuning": (
        "BERT", "PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 16}),
}  # fmt: skip
for title, (base, kind, details) in ADAPTED.items():
    make = functools.partial(adapted, base, kind, **details)
    add(title, "peft", make, tol=1e-6 if base == "Llama" else 1e-10)

# Its weights come from a torch.autograd.Function.
make = functools.partial(adapted, "Llama", "LoHaConfig", r=4, target_modules=["q_proj"])
add("LoHa", "peft", make, refused=r"autograd\.Function")


# -------------------------------------------------------------------------- timm, torchvision
def moved(model: nn.Module) -> nn.Module:
    """Without parameters that are all zero."""
    with torch.no_grad():
        for param in model.parameters():
            if not param.any():
                param.copy_(0.05 * torch.randn(param.shape, generator=_generator(4)))
    return model


def shown(build: Callable[[], nn.Module]) -> Parts:
    return moved(build().double().train()), {"x": pictures(), "labels": classes()}, classify


def from_timm(name: str, architecture: str, refused: str = "", **options: Any) -> None:
    def build() -> nn.Module:
        model: nn.Module = timm.create_model(architecture, num_classes=CLASSES, **options)
        return model

    add(name, "timm", functools.partial(shown, build), refused=refused)


VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
from_timm("ViT (timm)", "vit_tiny_patch16_224", **VIT)
from_timm("EVA-02", "eva02_tiny_patch14_224", **VIT)
from_timm("CaiT", "cait_xxs24_224", **VIT)
from_timm(
    "Swin (timm)", "swin_tiny_patch4_window7_224", img_size=32, patch_size=4, window_size=4,
    embed_dim=16, depths=(1, 1), num_heads=(2, 4), drop_path_rate=0.0,
)  # fmt: skip
from_timm("ConvNeXt", "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))
from_timm("ConvNeXt v2", "convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))
from_timm("PoolFormer", "poolformer_s12", layers=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32))
from_timm("EfficientNet (BatchNorm)", "efficientnet_b0", refused="GroupNorm")
add("ViT (torchvision)", "torchvision", functools.partial(
    shown, lambda: torchvision.models.VisionTransformer(32, 8, 1, 4, 32, 40, num_classes=CLASSES)
))  # fmt: skip
add("Swin (torchvision)", "torchvision", functools.partial(
    shown, lambda: torchvision.models.SwinTransformer(
        [4, 4], 16, [1, 1], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=CLASSES)
))  # fmt: skip
add("ResNet-18 (BatchNorm)", "torchvision", functools.partial(
    shown, lambda: torchvision.models.resnet18(num_classes=CLASSES)
), refused="GroupNorm")  # fmt: skip


def evaluated() -> Parts:
    """All parameters are trained, those of BatchNorm among them, beside its own statistics."""
    model, batch, loss = shown(lambda: torchvision.models.resnet18(num_classes=CLASSES))
    with torch.no_grad():
        model(pictures() + 1)
    return model.eval(), batch, loss


add("ResNet-18, BatchNorm in evaluation mode", "torchvision", evaluated)


# ----------------------------------------------------------------------------- ways to train
def random(base: str, **change: Any) -> Parts:
    """The same model with dropout or drop-path at work."""
    model, batch, loss = CASES[base].make()
    config: Any = model.config
    for name, value in change.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    again: nn.Module = type(model)(config)
    return again.double().train(), batch, loss


def saved(base: str, reentrant: bool) -> Parts:
    model, batch, loss = CASES[base].make()
    how = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)  # type: ignore[operator]
    return model, batch, loss


def compiled(base: str) -> Parts:
    model, batch, loss = CASES[base].make()
    built: Any = torch.compile(model, backend="eager")
    return built, batch, loss


def lowered(base: str, weights: bool) -> Parts:
    """In bfloat16: under autocast, or the weights themselves."""
    model, batch, loss = CASES[base].make()
    dtype = torch.bfloat16 if weights else torch.float32
    fixed = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}

    def low(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not weights):
            return loss(model, batch).float()

    return model.to(dtype), fixed, low


half = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
add("BERT, dropout", "training", functools.partial(random, "BERT", **half), seeded=True)
add("ViT, dropout", "training", functools.partial(random, "ViT", **half), seeded=True)
add("DETR, dropout", "training", functools.partial(found, 0.1), seeded=True)
add("DINOv2, drop-path", "training",
    functools.partial(random, "DINOv2", drop_path_rate=0.2), seeded=True)  # fmt: skip
for base in ("BERT", "Llama", "ViT"):
    tol = 1e-6 if base == "Llama" else 1e-10
    add(f"{base}, gradient checkpointing", "training",
        functools.partial(saved, base, False), tol=tol)  # fmt: skip
    add(f"{base}, bfloat16 autocast", "training",
        functools.partial(lowered, base, False), tol=0.1)  # fmt: skip
    add(f"{base}, bfloat16 weights", "training", functools.partial(lowered, base, True), tol=0.15)
add("ViT (timm), torch.compile", "training", functools.partial(compiled, "ViT (timm)"))

"""Hugging Face architectures of the zoo: text, speech and time series, from small configurations.

Nothing is downloaded: configurations are written here, weights are random. Each entry is another
architecture, not another size of one. Values in configurations that are a pair are for small and
for full inputs, in this order; the full ones have 4 layers of width 256 and 128 tokens.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from edgeweave.bench.inference_models import Inputs, ZooModel

__all__ = ["HF", "make_transformer"]

Sizes = Mapping[str, Any]

VOCABULARY = 1000
_STANDARD: Sizes = {
    "vocab_size": VOCABULARY,
    "hidden_size": (64, 256),
    "num_hidden_layers": (2, 4),
    "num_attention_heads": (4, 8),
    "intermediate_size": (128, 1024),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
# Key and value heads of attention that shares them.
_GROUPED: Sizes = {"num_key_value_heads": (2, 2), "head_dim": (16, 32)}
_EXPERTS: Sizes = {
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "moe_intermediate_size": (64, 256),
}
_SEQ2SEQ: Sizes = {
    "vocab_size": VOCABULARY,
    "d_model": (64, 256),
    "encoder_layers": (2, 3),
    "decoder_layers": (2, 3),
    "encoder_attention_heads": (4, 8),
    "decoder_attention_heads": (4, 8),
    "encoder_ffn_dim": (128, 1024),
    "decoder_ffn_dim": (128, 1024),
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
_T5: Sizes = {
    "vocab_size": VOCABULARY,
    "d_model": (64, 256),
    "d_kv": (16, 32),
    "d_ff": (128, 1024),
    "num_layers": (2, 3),
    "num_decoder_layers": (2, 3),
    "num_heads": (4, 8),
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
_SPEECH: Sizes = {
    **{key: _STANDARD[key] for key in _STANDARD if key not in ("use_cache",)},
    "vocab_size": 32,
    "conv_dim": ([32, 32, 32], [128, 128, 128, 128]),
    "conv_kernel": ([10, 3, 3], [10, 3, 3, 2]),
    "conv_stride": ([5, 2, 2], [5, 2, 2, 2]),
    "num_feat_extract_layers": (3, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}

# Name: the library's class, what it gets beside `_STANDARD`, the kind of input.
_ENCODERS: dict[str, tuple[str, Sizes]] = {
    "ALBERT": ("AlbertModel", {"embedding_size": 32}),
    "RoBERTa": ("RobertaModel", {"pad_token_id": 1}),
    "ELECTRA": ("ElectraModel", {"embedding_size": 32}),
    "DeBERTa": ("DebertaModel", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "DeBERTa-v2": (
        "DebertaV2Model",
        {
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 32,
            "share_att_key": True,
        },
    ),
    "MPNet": ("MPNetModel", {"pad_token_id": 1}),
    "ConvBERT": ("ConvBertModel", {"embedding_size": 64, "head_ratio": 2, "num_groups": 1}),
    "FNet": ("FNetModel", {}),
    "SqueezeBERT": ("SqueezeBertModel", {"embedding_size": (64, 256)}),
    "MobileBERT": (
        "MobileBertModel",
        {"embedding_size": 32, "intra_bottleneck_size": (32, 128), "true_hidden_size": (32, 128)},
    ),
    "RoFormer": ("RoFormerModel", {"embedding_size": 64}),
    "BigBird": ("BigBirdModel", {"attention_type": "original_full"}),
    "Longformer": ("LongformerModel", {"attention_window": (8, 32)}),
    "CANINE": ("CanineModel", {"num_hash_buckets": 256, "local_transformer_stride": (16, 64)}),
    "Funnel": (
        "FunnelModel",
        {
            "num_hidden_layers": None,
            "block_sizes": [1, 1],
            "d_head": 16,
            "d_inner": (128, 1024),
            "num_decoder_layers": 1,
        },
    ),
    "XLNet": ("XLNetModel", {"d_inner": (128, 1024), "d_head": (16, 32), "mem_len": None}),
    "XLM": ("XLMModel", {}),
    "RemBERT": (
        "RemBertModel", {"input_embedding_size": 32, "output_embedding_size": 32},
    ),
    "ModernBERT": (
        "ModernBertModel",
        {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "MegatronBERT": ("MegatronBertModel", {}),
    "LayoutLM": ("LayoutLMModel", {}),
    "ESM": (
        "EsmModel",
        {"position_embedding_type": "rotary", "token_dropout": False, "mask_token_id": 2},
    ),
    "I-BERT": ("IBertModel", {"pad_token_id": 1}),
    "YOSO": ("YosoModel", {"use_expectation": True}),
    "EuroBERT": ("EuroBertModel", {**_GROUPED, "mask_token_id": 3}),
    "NomicBERT": ("NomicBertModel", {}),
}  # fmt: skip
_DECODERS: dict[str, tuple[str, Sizes]] = {
    "OpenAI GPT": ("OpenAIGPTLMHeadModel", {}),
    "OPT": ("OPTForCausalLM", {"ffn_dim": (128, 1024), "word_embed_proj_dim": (64, 256)}),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        {
            "attention_types": ([[["global", "local"], 1]], [[["global", "local"], 2]]),
            "window_size": 16,
        },
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {}),
    "GPT-J": ("GPTJForCausalLM", {"rotary_dim": 8}),
    "CodeGen": ("CodeGenForCausalLM", {"rotary_dim": 8}),
    "BLOOM": ("BloomForCausalLM", {}),
    "MPT": ("MptForCausalLM", {"max_seq_len": 256}),
    "Falcon": ("FalconForCausalLM", {"multi_query": True}),
    "BioGPT": ("BioGptForCausalLM", {}),
    "XGLM": ("XGLMForCausalLM", {"ffn_dim": (128, 1024)}),
    "CTRL": ("CTRLLMHeadModel", {"dff": (128, 1024)}),
    "Llama": ("LlamaForCausalLM", {**_GROUPED}),
    "Mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 16}),
    "Mixtral": ("MixtralForCausalLM", {**_GROUPED, **_EXPERTS}),
    "Qwen2": ("Qwen2ForCausalLM", {**_GROUPED}),
    "Qwen3": ("Qwen3ForCausalLM", {**_GROUPED}),
    "Gemma": ("GemmaForCausalLM", {**_GROUPED}),
    "Gemma 2": ("Gemma2ForCausalLM", {**_GROUPED, "sliding_window": 16}),
    "Gemma 3": ("Gemma3ForCausalLM", {**_GROUPED, "sliding_window": 16}),
    "Phi": ("PhiForCausalLM", {}),
    "Phi-3": ("Phi3ForCausalLM", {"num_key_value_heads": 2}),
    "StableLM": ("StableLmForCausalLM", {**_GROUPED}),
    "StarCoder2": ("Starcoder2ForCausalLM", {**_GROUPED}),
    "OLMo": ("OlmoForCausalLM", {}),
    "OLMo 2": ("Olmo2ForCausalLM", {}),
    "OLMoE": ("OlmoeForCausalLM", {**_EXPERTS}),
    "Cohere": ("CohereForCausalLM", {**_GROUPED}),
    "Granite": ("GraniteForCausalLM", {**_GROUPED}),
    "GLM": ("GlmForCausalLM", {**_GROUPED}),
    "Persimmon": ("PersimmonForCausalLM", {}),
    "Nemotron": ("NemotronForCausalLM", {**_GROUPED}),
    "DiffLlama": ("DiffLlamaForCausalLM", {**_GROUPED}),
    "Mamba": ("MambaForCausalLM", {"state_size": 8}),
    "RWKV": ("RwkvForCausalLM", {"attention_hidden_size": (64, 256)}),
    "RecurrentGemma": (
        "RecurrentGemmaForCausalLM",
        {"num_key_value_heads": 1, "lru_width": (64, 256), "attention_window_size": 16},
    ),
}
_PAIRS: dict[str, tuple[str, Sizes]] = {
    "BART": ("BartModel", _SEQ2SEQ),
    "M2M100": ("M2M100Model", {**_SEQ2SEQ, "decoder_layerdrop": 0.0, "encoder_layerdrop": 0.0}),
    "LED": (
        "LEDModel",
        {
            **_SEQ2SEQ,
            "attention_window": (8, 32),
            "max_encoder_position_embeddings": 256,
            "max_decoder_position_embeddings": 256,
        },
    ),
    "ProphetNet": (
        "ProphetNetModel",
        {
            **{key: _SEQ2SEQ[key] for key in _SEQ2SEQ if not key.endswith("layers")},
            "hidden_size": (64, 256),
            "d_model": None,
            "encoder_attention_heads": None,
            "decoder_attention_heads": None,
            "num_encoder_layers": (2, 3),
            "num_decoder_layers": (2, 3),
            "num_encoder_attention_heads": (4, 8),
            "num_decoder_attention_heads": (4, 8),
        },
    ),
    "T5": ("T5Model", _T5),
    "LongT5": ("LongT5Model", {**_T5, "local_radius": (7, 31)}),
    "UMT5": ("UMT5Model", {**_T5, "feed_forward_proj": "gated-gelu"}),
}
_SPEAKERS: dict[str, tuple[str, Sizes]] = {
    "Wav2Vec2": ("Wav2Vec2ForCTC", _SPEECH),
    "HuBERT": ("HubertForCTC", _SPEECH),
    "WavLM": ("WavLMForCTC", {**_SPEECH, "num_buckets": 32}),
    "SEW": ("SEWForCTC", {**_SPEECH, "squeeze_factor": 2}),
}


# Recurrent: they know no mask.
_WITHOUT_MASK = ("RWKV", "Mamba")


def _sized(sizes: Sizes, quick: bool) -> dict[str, Any]:
    """A configuration's values, one of each pair."""
    pick = 0 if quick else 1
    return {k: v[pick] if isinstance(v, tuple) else v for k, v in sizes.items()}


def make_transformer(cls: str, sizes: Sizes, quick: bool) -> nn.Module:
    """A model of the library with random weights.

    Args:
        cls: Name of its class.
        sizes: Its configuration; a pair is for small and for full inputs.
        quick: Which of the pair.

    Returns:
        The model, in training mode.
    """
    found = getattr(importlib.import_module("transformers"), cls)
    # None leaves a value of `_STANDARD` out.
    values = {k: v for k, v in _sized(sizes, quick).items() if v is not None}
    model: nn.Module = found(found.config_class(**values))
    return model


def _ids(batch: int, quick: bool) -> torch.Tensor:
    # Small numbers are special tokens: padding, begin and end.
    return torch.randint(5, VOCABULARY, (batch, 32 if quick else 128))


def _tokens(batch: int, quick: bool) -> Inputs:
    ids = _ids(batch, quick)
    return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _ids_alone(batch: int, quick: bool) -> Inputs:
    return (), {"input_ids": _ids(batch, quick)}


def _both_sides(batch: int, quick: bool) -> Inputs:
    ids = _ids(batch, quick)
    return (), {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "decoder_input_ids": _ids(batch, quick)[:, :16],
    }


def _sound(batch: int, quick: bool) -> Inputs:
    return (), {"input_values": torch.randn(batch, 2_000 if quick else 16_000)}


def _mel(batch: int, quick: bool) -> Inputs:
    features = torch.randn(batch, 40, 64 if quick else 400)
    return (), {"input_features": features, "decoder_input_ids": _ids(batch, quick)[:, :16]}


def _spectrogram(batch: int, quick: bool) -> Inputs:
    return (), {"input_values": torch.randn(batch, 64 if quick else 256, 64)}


def _series(batch: int, quick: bool) -> Inputs:
    return (), {"past_values": torch.randn(batch * 4, 64 if quick else 512, 7)}


def _pictures_and_words(batch: int, quick: bool) -> Inputs:
    args, kwargs = _tokens(batch, quick)
    side = 32 if quick else 224
    return args, {**kwargs, "pixel_values": torch.randn(batch, 3, side, side)}


_TOWER: Sizes = {
    "hidden_size": (64, 256),
    "num_hidden_layers": (2, 4),
    "num_attention_heads": (4, 8),
    "intermediate_size": (128, 1024),
}


def _two_towers(cls: str, quick: bool) -> nn.Module:
    text = {**_sized(_TOWER, quick), "vocab_size": VOCABULARY, "max_position_embeddings": 128}
    text.update(bos_token_id=1, eos_token_id=2)
    image = {**_sized(_TOWER, quick), "image_size": 32 if quick else 224, "patch_size": 16}
    more = {"projection_dim": 32} if cls == "CLIPModel" else {}
    return make_transformer(cls, {"text_config": text, "vision_config": image, **more}, quick)


_OTHERS: dict[str, tuple[str, Sizes, Any]] = {
    "Whisper": (
        "WhisperModel",
        {**_SEQ2SEQ, "num_mel_bins": 40, "max_source_positions": (32, 200)},
        _mel,
    ),
    "AST": (
        "ASTForAudioClassification",
        {**_TOWER, "max_length": (64, 256), "num_mel_bins": 64, "num_labels": 10},
        _spectrogram,
    ),
    "PatchTST": (
        "PatchTSTForPrediction",
        {
            "num_input_channels": 7,
            "context_length": (64, 512),
            "patch_length": 16,
            "patch_stride": 8,
            "d_model": (32, 128),
            "num_attention_heads": 4,
            "ffn_dim": (64, 512),
            "num_hidden_layers": 2,
            "loss": "mse",
            "do_mask_input": False,
        },
        _series,
    ),
    "PatchTSMixer": (
        "PatchTSMixerForPrediction",
        {
            "num_input_channels": 7,
            "context_length": (64, 512),
            "d_model": (16, 64),
            "num_layers": 2,
            "loss": "mse",
        },
        _series,
    ),
}  # fmt: skip


def _entries() -> dict[str, ZooModel]:
    found: dict[str, ZooModel] = {}

    def add(name: str, cls: str, sizes: Sizes, inputs: Any) -> None:
        found[name] = ZooModel(name, "hf", functools.partial(make_transformer, cls, sizes), inputs)

    for table in (_ENCODERS, _DECODERS):
        for name, (cls, more) in table.items():
            inputs = _ids_alone if name in _WITHOUT_MASK else _tokens
            add(name, cls, {**_STANDARD, **more}, inputs)
    for name, (cls, sizes) in _PAIRS.items():
        add(name, cls, sizes, _both_sides)
    for name, (cls, sizes) in _SPEAKERS.items():
        add(name, cls, sizes, _sound)
    for name, (cls, sizes, inputs) in _OTHERS.items():
        add(name, cls, sizes, inputs)
    for name, cls in (("CLIP", "CLIPModel"), ("SigLIP", "SiglipModel")):
        make = functools.partial(_two_towers, cls)
        found[name] = ZooModel(name, "hf", make, _pictures_and_words)
    return found


HF: Mapping[str, ZooModel] = _entries()
"""The entries by name."""

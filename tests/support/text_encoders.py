"""Text encoders so small that one is built, saved and opened in a moment: networks of transformers, random weights."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from ddm.io.tensors import save_tensors

WORDS = ("<pad>", "</s>", "<unk>", "bright", "dark", "left", "right", "secret")
DIM = 8
_BERT_LIKE = {
    "vocab_size": 16,
    "hidden_size": DIM,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_T5_LIKE = {
    "vocab_size": 16,
    "d_model": DIM,
    "d_kv": 4,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
}


def make_encoder(kind: str, seed: int = 0) -> nn.Module:
    """Build a network, with its configuration as `config`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of imports
        import transformers as t

        settings: dict[str, Any] = {
            "T5EncoderModel": lambda: t.T5Config(**_T5_LIKE),
            "T5Model": lambda: t.T5Config(
                **_T5_LIKE, num_decoder_layers=1, decoder_start_token_id=0
            ),
            "FNetModel": lambda: t.FNetConfig(**_BERT_LIKE),
            "BertModel": lambda: t.BertConfig(**_BERT_LIKE),
            "LlamaModel": lambda: t.LlamaConfig(**_BERT_LIKE),
            "CLIPModel": lambda: t.CLIPConfig(
                text_config=_BERT_LIKE,
                vision_config=_BERT_LIKE | {"image_size": 8, "patch_size": 4},
                projection_dim=4,
            ),
            "BartModel": lambda: t.BartConfig(
                vocab_size=16,
                d_model=DIM,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=8,
                decoder_ffn_dim=8,
                max_position_embeddings=12,
            ),
        }
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            net: nn.Module = getattr(t, kind)(settings[kind]())
    return net.eval()


def save_encoder(folder: Path, net: nn.Module, unknown: str | None = "<unk>") -> Path:
    """Write what a folder of a published encoder holds."""
    folder.mkdir(parents=True)
    config: Any = net.config
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    save_tensors(folder / "model.safetensors", net.state_dict())
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token=unknown or "")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder

"""A frozen text encoder from a local folder: prompts and captions become the vectors that experts are told.

The only door to transformers and tokenizers. Neither is given a folder or a name, which they could look up elsewhere:
what is pinned is read here, held to its digest, and handed over as bytes, settings and tensors. So nothing is ever
downloaded, no code beside the weights is run, no pickle is opened, and other files in the folder are not looked at.
"""

# Shape legend: N texts, B texts of one block, L tokens, D values of a token.
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddm.encoders.timm import import_torchvision
from ddm.errors import ArchipelagoError, DigestError, NumericalError, SetupError, ShapeError
from ddm.io.files import read_bounded, require_file
from ddm.io.tensors import load_tensors
from ddm.protocol.base import File, sha256_file, sha256_hex
from ddm.protocol.plan import PinnedEncoder, TextCondition
from ddm.system.devices import device_named

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
BLOCK = 64
_MAX_SMALL_BYTES = 64 * 1024**2  # of configuration and tokenizer
_MAX_WEIGHT_BYTES = 64 * 1024**3  # of one file
_PADDED = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # most that rounding changes vectors by when a text is padded
_SHARD = re.compile(r"model-[0-9]{5}-of-([0-9]{5})\.safetensors")


class TextEncoder:
    """A frozen network and its tokenizer.

    Args:
        net: answers `last_hidden_state`, shape (B, L, D).
        tokenizer: of the tokenizers library; cuts off what is too long.
        max_tokens: L.

    Raises:
        SetupError: a text's vectors change when it is padded: they would depend on the texts beside it.
    """

    def __init__(self, net: nn.Module, tokenizer: Any, max_tokens: int) -> None:
        self.net = net.eval().requires_grad_(False)
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self.device = device_named()
        alone_LD, beside_LD = self._hidden([[0]])[0], self._hidden([[0], [0] * max_tokens])[0]
        self.dim = alone_LD.shape[1]
        apart = _PADDED[next(self.net.parameters()).dtype] * alone_LD.abs().max()
        if (alone_LD - beside_LD[:1]).abs().max() > apart:
            raise SetupError("text encoder", expected="one that reads no padding", got="a network that minds it")

    @classmethod
    def open(cls, folder: Path | str, condition: TextCondition) -> "TextEncoder":
        """Open the encoder that a plan pins.

        Args:
            folder: holds its files; others beside them are not read.
            condition: the plan's.

        Raises:
            SetupError: the plan pins none, transformers cannot build it, or its vectors change when a text is padded.
            MissingFileError: a pinned file is not in the folder.
            DigestError: a file is not the pinned one.
            TensorFileError: weights that are no safetensors, or not finite.
            ShapeError: it answers vectors of another width than the plan's.
        """
        pinned = pinned_of(condition)
        opened = _open(Path(folder), pinned, condition.max_tokens)
        if opened.dim != condition.dim:
            raise ShapeError(f"text encoder {pinned.name}", expected=f"{condition.dim} values", got=str(opened.dim))
        return opened

    def encode(self, texts: Sequence[str], on_progress: Callable[[int, int], None] | None = None) -> Tensor:
        """Return what experts are told of texts, shape (N, L, D), float32 on the CPU; in bfloat16 on a GPU.

        A token of zeros is padding, and a blank text is padding alone, which is no text. What is longer than L tokens
        is cut off, see `num_cut`.

        Args:
            texts: any.
            on_progress: called with texts done and texts in all; what it raises ends the work.

        Raises:
            SetupError: a text that the tokenizer has no tokens for.
            NumericalError: vectors that are not finite.
        """
        found = torch.zeros(len(texts), self.max_tokens, self.dim)
        for start in range(0, len(texts), BLOCK):
            block = [self._tokens(text).ids if text.strip() else [] for text in texts[start : start + BLOCK]]
            there = [row for row, ids in enumerate(block) if ids]
            if there:
                hidden_BLD = self._hidden([block[row] for row in there])
                found[torch.tensor(there) + start, : hidden_BLD.shape[1]] = hidden_BLD
            if on_progress:
                on_progress(min(start + BLOCK, len(texts)), len(texts))
        return found

    def num_cut(self, texts: Sequence[str]) -> int:
        """Return how many of these texts are longer than L tokens."""
        return sum(bool(self._tokens(text).overflowing) for text in texts)

    def _tokens(self, text: str) -> Any:
        try:
            return self.tokenizer.encode(text)
        except Exception:  # the library's own; the text is private, so nothing of what it says goes on
            raise SetupError("text", expected="one that the tokenizer knows", got="another") from None

    @torch.no_grad()
    def _hidden(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Return vectors of texts, on the right padded to the longest by zeros, shape (B, up to L, D)."""
        lengths = torch.tensor([len(each) for each in ids])
        read_BL = torch.arange(int(lengths.max())) < lengths[:, None]
        ids_BL = torch.zeros(read_BL.shape, dtype=torch.int64)
        ids_BL[read_BL] = torch.tensor([one for each in ids for one in each])
        net = self.net.to(self.device)
        told = {"input_ids": ids_BL.to(self.device), "attention_mask": read_BL.long().to(self.device)}
        hidden_BLD = net(**told).last_hidden_state.float().cpu()
        if not bool(torch.isfinite(hidden_BLD[read_BL]).all()):
            raise NumericalError("text encoder's output", expected="finite numbers", got="some that are not")
        return torch.where(read_BL[..., None], hidden_BLD, 0.0)


def pin(folder: Path, *, max_tokens: int, drop: float) -> TextCondition:
    """Write down the encoder in a folder as a plan pins it, after opening it once.

    Raises:
        MissingFileError, SetupError, TensorFileError: see `TextEncoder.open`; or no safetensors weights, or a network
            that cannot read `max_tokens`.
    """
    names = [CONFIG, TOKENIZER, *_weights(folder)]
    try:
        pinned = PinnedEncoder(name=folder.resolve().name, files=tuple(_pinned_file(folder, each) for each in names))
    except ValueError as error:
        expected = "a folder named with letters, digits and . _ - alone"
        raise SetupError("text encoder", expected=expected, got="another name") from error
    dim = _open(folder, pinned, max_tokens).dim
    return TextCondition(dim=dim, max_tokens=max_tokens, drop=drop, encoder=pinned)


def pinned_of(condition: TextCondition) -> PinnedEncoder:
    """Return the encoder that a condition pins.

    Raises:
        SetupError: it pins none.
    """
    if condition.encoder is None:
        remedy = "Bring texts as vectors: Ensemble.sample(condition=...)."
        raise SetupError("text encoder", expected="one that the plan pins", got="a plan without", remedy=remedy)
    return condition.encoder


def check_files(folder: Path, pinned: PinnedEncoder) -> None:
    """Hold a folder to the pinned files without opening the encoder.

    Raises:
        MissingFileError: a file is not there.
        DigestError: one is another.
    """
    for file in pinned.files:
        path = _required(folder, pinned, file)
        if sha256_file(path) != file.digest:
            raise _other(pinned, file.path)


def _pinned_file(folder: Path, name: str) -> File:
    path = require_file(folder / name, "a file of a text encoder")
    if not path.stat().st_size:
        raise SetupError(f"text encoder, {name}", expected="a file that was copied whole", got="an empty one")
    return File.of(name, path)


def _weights(folder: Path) -> list[str]:
    """Name the weights: one file, or all the shards of one network."""
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    shards = sorted(path.name for path in folder.glob("model-*.safetensors") if _SHARD.fullmatch(path.name))
    wanted = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    if not shards or shards != wanted:
        expected = "model.safetensors, or model-00001-of-0000N.safetensors to the last"
        got = f"{len(shards)} parts that are not a whole" if shards else "neither"
        remedy = "Pickled weights are not read. Convert them: AutoModel.from_pretrained(...).save_pretrained(folder)."
        raise SetupError(str(folder), expected=expected, got=got, remedy=remedy)
    return shards


def _required(folder: Path, pinned: PinnedEncoder, file: File) -> Path:
    """Return where a pinned file lies, links followed, if something of its length lies there."""
    remedy = f"Bring the folder of {pinned.name} with which the plan was made."
    path = require_file(folder / file.path, f"a file of the text encoder {pinned.name}", remedy).resolve()
    if path.stat().st_size != file.bytes:
        raise _other(pinned, file.path)
    return path


def _other(pinned: PinnedEncoder, name: str) -> DigestError:
    remedy = f"Bring the folder of {pinned.name} with which the plan was made: its vectors are what experts know."
    subject = f"text encoder {pinned.name}, {name}"
    return DigestError(subject, expected="the file that the plan pins", got="another", remedy=remedy)


def _open(folder: Path, pinned: PinnedEncoder, max_tokens: int) -> TextEncoder:
    """Read every pinned file once, each held to its digest, and build network and tokenizer of them."""
    small: dict[str, bytes] = {}
    weights: dict[str, Tensor] = {}
    for file in pinned.files:
        path = _required(folder, pinned, file)
        if file.path.endswith(".safetensors"):
            try:
                weights |= load_tensors(path, None, max_bytes=_MAX_WEIGHT_BYTES, digest=file.digest)
            except DigestError as error:
                raise _other(pinned, file.path) from error
        else:
            small[file.path] = read_bounded(path, _MAX_SMALL_BYTES)
            if sha256_hex(small[file.path]) != file.digest:
                raise _other(pinned, file.path)
    if set(small) != {CONFIG, TOKENIZER}:
        raise SetupError(f"text encoder {pinned.name}", expected=f"{CONFIG} and {TOKENIZER}", got="others pinned")
    try:
        with _quiet():
            net, tokenizer = _network(json.loads(small[CONFIG]), weights), _tokenizer(small[TOKENIZER], max_tokens)
            return TextEncoder(net, tokenizer, max_tokens)
    except ArchipelagoError:
        raise
    except ImportError as error:
        remedy = "Install it: pip install 'archipelago[text]'."
        expected = "transformers installed, with all that this network needs"
        raise SetupError("texts", expected=expected, got=str(error)[:200], remedy=remedy) from error
    except Exception as error:  # whatever settings that fit no network make transformers and torch raise
        raise SetupError(
            f"text encoder {pinned.name}",
            expected=f"a network of transformers that reads {max_tokens} tokens, its weights whole",
            got=" ".join(f"{type(error).__name__}: {error}".split())[:200],
        ) from error


def _network(settings: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
    """Build the part of a network that reads texts, from settings and weights alone."""
    config, kind = _tower(settings)
    if settings.get("quantization_config") or getattr(config, "quantization_config", None):
        raise ValueError("its weights are quantized")  # to be read by code that transformers fetches, or not at all
    config.use_cache = False
    dtype = torch.bfloat16 if device_named().type == "cuda" else torch.float32  # T5 overflows in float16
    options = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
    net: nn.Module
    net, found = kind.from_pretrained(None, config=config, state_dict=weights, **options)
    # A pooler sums the vectors up, which nobody asks for; many published files are without.
    missing = [name for name in found["missing_keys"] if not name.startswith("pooler.")]
    if lost := [*missing, *found["mismatched_keys"], *found["error_msgs"]]:
        raise ValueError(f"{len(lost)} weights are missing or of another shape")
    return net


def _tower(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the configuration and the class of what reads texts.

    CLIP and others have a tower for each kind of input; the others are not even configured. For among settings there
    may be the name of another network, as a backbone, which transformers would look up and download.
    """
    from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING, AutoConfig

    found = _config_class(settings)
    if "text_config" in found.sub_configs:
        settings, found = settings.get("text_config") or {}, found.sub_configs["text_config"]
        found = _config_class(settings) if found is AutoConfig else found
    encodes = found in MODEL_FOR_TEXT_ENCODING_MAPPING
    kind: Any = (MODEL_FOR_TEXT_ENCODING_MAPPING if encodes else MODEL_MAPPING).get(found, None)
    kind = kind[0] if isinstance(kind, tuple) else kind
    if kind is None or kind.main_input_name != "input_ids" or AutoConfig in found.sub_configs.values():
        raise ValueError(f"transformers knows no {found.model_type} that reads texts alone")
    config = found.from_dict(settings)
    if config.is_encoder_decoder and not encodes:
        raise ValueError(f"transformers knows no encoder of a {found.model_type} by itself")
    return config, kind


def _config_class(settings: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    if settings.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(f"{CONFIG} names no model_type that transformers knows")
    return CONFIG_MAPPING[settings["model_type"]]


def _tokenizer(data: bytes, max_tokens: int) -> Any:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library's own
        raise ValueError(f"{TOKENIZER} is no tokenizer") from error
    if (num := tokenizer.num_special_tokens_to_add(is_pair=False)) >= max_tokens:
        raise ValueError(f"every text has {num} tokens beside its words")
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    return tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Let neither imports nor progress bars of transformers write to the terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of imports that neither we nor the operator can change
        import_torchvision()
        from transformers.utils import logging

        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()

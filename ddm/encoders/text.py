"""A frozen text encoder from a local folder: embeds prompts and captions for the experts.

Only this file imports transformers and tokenizers. Neither receives a folder or a name that it could look up elsewhere:
the pinned files are read here, checked against their digests, and passed on as bytes, settings and tensors. So nothing
is downloaded, no code beside the weights runs, no pickle is opened, and other files in the folder are not read.
"""

# Shape legend: N texts, L tokens, D values of a token.
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddm.encoders.lost import fill_lost
from ddm.encoders.timm import import_torchvision
from ddm.errors import ArchipelagoError, DigestError, NumericalError, SetupError, ShapeError
from ddm.io.files import read_bounded, require_file
from ddm.io.tensors import load_tensors
from ddm.protocol.architecture import PinnedEncoder, TextCondition
from ddm.protocol.base import File, sha256_file, sha256_hex
from ddm.system.devices import device_named

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
BLOCK = 64  # texts between two reports of the progress
_MAX_SMALL_BYTES = 64 * 1024**2  # of configuration and tokenizer
_MAX_WEIGHT_BYTES = 64 * 1024**3  # of one file
_SHARD = re.compile(r"model-[0-9]{5}-of-([0-9]{5})\.safetensors")


class TextEncoder:
    """A frozen network and its tokenizer.

    Args:
        net: returns `last_hidden_state`, shape (B, L, D).
        tokenizer: of the tokenizers library; truncates texts that are too long.
        max_tokens: L.
    """

    def __init__(self, net: nn.Module, tokenizer: Any, max_tokens: int) -> None:
        self.device = device_named()
        self.net = net.eval().requires_grad_(False).to(self.device)
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self.dim = self._hidden([0] * max_tokens).shape[1]  # of as many tokens as it must take

    @classmethod
    def open(cls, folder: Path | str, condition: TextCondition) -> "TextEncoder":
        """Open the encoder that a plan pins.

        Args:
            folder: holds its files; other files there are not read.
            condition: the plan's.

        Raises:
            SetupError: the plan pins none, or transformers cannot build it.
            MissingFileError: a pinned file is not in the folder.
            DigestError: a file differs from the pinned one.
            TensorFileError: the weights are not safetensors, or not finite.
            ShapeError: its embeddings have another width than the plan's.
        """
        pinned = pinned_of(condition)
        opened = _open(Path(folder), pinned, condition.max_tokens)
        if opened.dim != condition.dim:
            expected, got = f"embeddings of {condition.dim} values", str(opened.dim)
            raise ShapeError(f"text encoder {pinned.name}", expected=expected, got=got)
        return opened

    def encode(
        self,
        texts: Sequence[str],
        on_progress: Callable[[int, int], None] | None = None,
        *,
        lost: float | None = None,
    ) -> Tensor:
        """Return the token embeddings of texts, shape (N, L, D), float32 on the CPU; computed in bfloat16 on a GPU.

        A token of zeros is padding. A blank text is padding only, which is the null condition. Texts are truncated to L
        tokens, see `num_cut`. Each is encoded by itself, so that its embeddings are the same bits whatever the other
        texts are, and however many (docs/adr/0065-a-unit-is-computed-alone.md).

        Args:
            texts: any texts.
            on_progress: called with texts done and texts in all; an exception that it raises stops the encoding.
            lost: what the embeddings of a text become that are not all finite; a text that the tokenizer cannot encode
                then counts as blank. None refuses both.

        Raises:
            SetupError: a text that the tokenizer cannot encode.
            NumericalError: embeddings that are not finite.
        """
        found = torch.zeros(len(texts), self.max_tokens, self.dim)
        for done, text in enumerate(texts, 1):
            if ids := self._ids(text, lost):
                found[done - 1, : len(ids)] = fill_lost(self._hidden(ids)[None], lost, _not_finite)[
                    0
                ]
            if on_progress and (done % BLOCK == 0 or done == len(texts)):
                on_progress(done, len(texts))
        return found

    def num_cut(self, texts: Sequence[str]) -> int:
        """Return how many of these texts are longer than L tokens."""
        num = 0
        for text in texts:
            with suppress(SetupError):
                num += bool(self._tokens(text).overflowing)
        return num

    def _ids(self, text: str, lost: float | None) -> Sequence[int]:
        with nullcontext() if lost is None else suppress(SetupError):
            return list(self._tokens(text).ids) if text.strip() else []
        return []

    def _tokens(self, text: str) -> Any:
        try:
            return self.tokenizer.encode(text)
        # the library's own, left out since its message may quote the private text
        except Exception:
            expected, got = "a text that the tokenizer can encode", "a text that it rejects"
            raise SetupError("text", expected=expected, got=got) from None

    @torch.no_grad()
    def _hidden(self, ids: Sequence[int]) -> Tensor:
        """Return the embeddings of a text of L tokens, shape (L, D)."""
        ids_1L = torch.tensor([ids], device=self.device)
        hidden_1LD: Tensor = self.net(
            input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L)
        ).last_hidden_state
        return hidden_1LD[0].float().cpu()


def _not_finite() -> NumericalError:
    return NumericalError("text encoder's output", expected="finite numbers", got="NaN or infinity")


def pin(folder: Path, *, max_tokens: int, drop: float) -> TextCondition:
    """Pin the encoder in a folder for a plan, by the digests of its files, after opening it once.

    Raises:
        MissingFileError, SetupError, TensorFileError: see `TextEncoder.open`; also a folder without safetensors
            weights, or a network that takes fewer than `max_tokens`.
    """
    names = [CONFIG, TOKENIZER, *weight_files(folder)]
    try:
        pinned = PinnedEncoder(
            name=folder.resolve().name, files=tuple(_pinned_file(folder, each) for each in names)
        )
    except ValueError as error:
        expected = "a folder whose name has only letters, digits and . _ -"
        got = ascii(folder.resolve().name[:80])
        raise SetupError("text encoder", expected=expected, got=got) from error
    dim = _open(folder, pinned, max_tokens).dim
    return TextCondition(dim=dim, max_tokens=max_tokens, drop=drop, encoder=pinned)


def pinned_of(condition: TextCondition) -> PinnedEncoder:
    """Return the encoder that a condition pins.

    Raises:
        SetupError: it pins none.
    """
    if condition.encoder is None:
        remedy = "Pass the embeddings of a text yourself: Ensemble.sample(condition=...)."
        got = "a plan without a text encoder"
        raise SetupError("text encoder", expected="a plan that pins one", got=got, remedy=remedy)
    return condition.encoder


def check_files(folder: Path, pinned: PinnedEncoder) -> None:
    """Check a folder against the pinned files without opening the encoder.

    Raises:
        MissingFileError: a file is missing.
        DigestError: a file differs from the pinned one.
    """
    for file in pinned.files:
        path = _required(folder, pinned, file)
        if (found := sha256_file(path)) != file.digest:
            raise _differs(pinned, file, f"sha256 {found[:16]}...")


def _pinned_file(folder: Path, name: str) -> File:
    path = require_file(folder / name, "a file of a text encoder")
    if not path.stat().st_size:
        raise SetupError(
            f"text encoder, {name}", expected="a file that was copied whole", got="an empty file"
        )
    return File.of(name, path)


def weight_files(folder: Path) -> list[str]:
    """Name the weights: one file, or all the shards of one network."""
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    shards = sorted(
        path.name for path in folder.glob("model-*.safetensors") if _SHARD.fullmatch(path.name)
    )
    wanted = [
        f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))
    ]
    if not shards or shards != wanted:
        expected = "model.safetensors, or model-00001-of-0000N.safetensors to the last"
        got = (
            f"{len(shards)} shards that are not a complete set"
            if shards
            else "no file of these names"
        )
        remedy = "Pickled weights are not read. Convert them: AutoModel.from_pretrained(...).save_pretrained(folder)."
        raise SetupError(str(folder), expected=expected, got=got, remedy=remedy)
    return shards


def _required(folder: Path, pinned: PinnedEncoder, file: File) -> Path:
    """Return the path of a pinned file, links resolved, after checking its length."""
    remedy = f"Bring the folder of {pinned.name} with which the plan was made."
    path = require_file(
        folder / file.path, f"a file of the text encoder {pinned.name}", remedy
    ).resolve()
    if (size := path.stat().st_size) != file.bytes:
        raise _differs(pinned, file, f"{size} bytes")
    return path


def _differs(pinned: PinnedEncoder, file: File, got: str) -> DigestError:
    remedy = f"Bring the folder of {pinned.name} with which the plan was made: the experts know only its embeddings."
    subject = f"text encoder {pinned.name}, {file.path}"
    expected = f"the file that the plan pins, {file.bytes} bytes, sha256 {file.digest[:16]}..."
    return DigestError(subject, expected=expected, got=got, remedy=remedy)


def _open(folder: Path, pinned: PinnedEncoder, max_tokens: int) -> TextEncoder:
    """Read every pinned file once, check its digest, and build the network and the tokenizer."""
    small: dict[str, bytes] = {}
    weights: dict[str, Tensor] = {}
    for file in pinned.files:
        path = _required(folder, pinned, file)
        if file.path.endswith(".safetensors"):
            try:
                weights |= load_tensors(path, None, max_bytes=_MAX_WEIGHT_BYTES, digest=file.digest)
            except DigestError as error:
                raise _differs(pinned, file, f"a file of {error.got}") from error
        else:
            small[file.path] = read_bounded(path, _MAX_SMALL_BYTES)
            if (found := sha256_hex(small[file.path])) != file.digest:
                raise _differs(pinned, file, f"sha256 {found[:16]}...")
    if set(small) != {CONFIG, TOKENIZER}:
        got = ", ".join(sorted(small))[:200] or "only weights"
        raise SetupError(
            f"text encoder {pinned.name}", expected=f"{CONFIG} and {TOKENIZER} pinned", got=got
        )
    try:
        with quiet():
            net, tokenizer = (
                _network(json.loads(small[CONFIG]), weights),
                _tokenizer(small[TOKENIZER], max_tokens),
            )
            return TextEncoder(net, tokenizer, max_tokens)
    except ArchipelagoError:
        raise
    except ImportError as error:
        remedy = "Install it: in Archipelago's repository, pip install '.[text]'."
        expected = "an installed transformers with all that this network needs"
        raise SetupError("texts", expected=expected, got=str(error)[:200], remedy=remedy) from error
    # transformers and torch raise all kinds of errors for settings that fit no network
    except Exception as error:
        raise SetupError(
            f"text encoder {pinned.name}",
            expected=f"a network of transformers that takes {max_tokens} tokens, and all of its weights",
            got=" ".join(f"{type(error).__name__}: {error}".split())[:200],
        ) from error


def _network(settings: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
    """Build the text encoder of a network, from settings and weights only."""
    config, kind = _tower(settings)
    if settings.get("quantization_config") or getattr(config, "quantization_config", None):
        # which transformers reads with code that it would download
        raise ValueError("its weights are quantized")
    config.use_cache = False
    # T5 overflows in float16
    dtype = torch.bfloat16 if device_named().type == "cuda" else torch.float32
    options = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
    net: nn.Module
    net, found = kind.from_pretrained(None, config=config, state_dict=weights, **options)
    # The pooler is not used, and many published files lack its weights.
    missing = [name for name in found["missing_keys"] if not name.startswith("pooler.")]
    if lost := [*missing, *found["mismatched_keys"], *found["error_msgs"]]:
        raise ValueError(f"{len(lost)} weights are missing or of another shape")
    return net


def _tower(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the configuration and the class of the text encoder.

    CLIP and others have one tower per kind of input. Only the text tower is configured, since the settings of another
    may name a network as its backbone, which transformers would look up and download.
    """
    from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING, AutoConfig

    found = _config_class(settings)
    if "text_config" in found.sub_configs:
        settings, found = settings.get("text_config") or {}, found.sub_configs["text_config"]
        found = _config_class(settings) if found is AutoConfig else found
    encodes = found in MODEL_FOR_TEXT_ENCODING_MAPPING
    kind: Any = (MODEL_FOR_TEXT_ENCODING_MAPPING if encodes else MODEL_MAPPING).get(found, None)
    kind = kind[0] if isinstance(kind, tuple) else kind
    if (
        kind is None
        or kind.main_input_name != "input_ids"
        or AutoConfig in found.sub_configs.values()
    ):
        raise ValueError(f"transformers has no {found.model_type} that takes texts only")
    config = found.from_dict(settings)
    if config.is_encoder_decoder and not encodes:
        raise ValueError(f"transformers has no separate encoder for {found.model_type}")
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
        raise ValueError(f"{TOKENIZER} does not parse as a tokenizer") from error
    if (num := tokenizer.num_special_tokens_to_add(is_pair=False)) >= max_tokens:
        raise ValueError(
            f"the tokenizer adds {num} special tokens to each text, of at most {max_tokens}"
        )
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    return tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from third-party imports
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

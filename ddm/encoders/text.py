"""A frozen text encoder from a local folder: embeds prompts and captions for the experts.

Only this file imports transformers and tokenizers. Neither receives a folder or a name that it could look up elsewhere:
the pinned files are read here, checked against their digests, and passed on as bytes, settings and tensors. So nothing
is downloaded, no code beside the weights runs, no pickle is opened, and other files in the folder are not read.
"""

# Shape legend: N texts, L tokens, D values of a token.
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddm.encoders.non_finite import replace_non_finite
from ddm.errors import ArchipelagoError, DigestError, NumericalError, SetupError, ShapeError
from ddm.io.files import read_bounded, require_file
from ddm.io.tensors import load_tensors
from ddm.protocol.architecture import PinnedEncoder, TextCondition
from ddm.protocol.base import File, sha256_file, sha256_hex
from ddm.system.devices import device_named
from ddm.system.progress import ProgressCallback

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
# Texts between two reports of the progress.
BLOCK = 64
# Of configuration and tokenizer, and of one file of weights.
_MAX_SMALL_BYTES = 64 * 1024**2
_MAX_WEIGHT_BYTES = 64 * 1024**3
_SHARD = re.compile(r"model-[0-9]{5}-of-([0-9]{5})\.safetensors")


class TextEncoder:
    """A frozen network and its tokenizer.

    Args:
        net: returns `last_hidden_state`, shape (B, L, D).
        tokenizer: a tokenizer of the tokenizers library; truncates texts that are too long.
        max_tokens: L.
    """

    def __init__(
        self,
        net: nn.Module,
        tokenizer: Any,
        max_tokens: int,
    ) -> None:
        # Frozen: a plan pins its digest, and experts know only its embeddings.
        self.device = device_named()
        self.net = net.eval().requires_grad_(False).to(self.device)
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        # The longest text that it must take also shows whether it takes it.
        self.dim = self._embed_tokens([0] * max_tokens).shape[1]

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
        encoder = _open(Path(folder), pinned, condition.max_tokens)
        if encoder.dim != condition.dim:
            raise ShapeError(
                f"text encoder {pinned.name}",
                expected=f"embeddings of {condition.dim} values",
                got=str(encoder.dim),
            )
        return encoder

    def encode(
        self,
        texts: Sequence[str],
        on_progress: ProgressCallback | None = None,
        *,
        replacement: float | None = None,
    ) -> Tensor:
        """Return the token embeddings of texts, shape (N, L, D), float32 on the CPU; computed in bfloat16 on a GPU.

        A token of zeros is padding. A blank text is padding only, which is the null condition. Texts are truncated to L
        tokens, see `num_cut`. Each is encoded by itself, so that its embeddings are the same bits whatever the other
        texts are, and however many (docs/adr/0065-a-unit-is-computed-alone.md).

        Args:
            texts: any texts.
            on_progress: called with texts done and texts in all; an exception that it raises stops the encoding.
            replacement: every value of the embeddings of a text that are not all finite; a text that the tokenizer
                cannot encode then counts as blank. None refuses both.

        Raises:
            SetupError: a text that the tokenizer cannot encode.
            NumericalError: embeddings that are not finite.
        """
        embeddings_NLD = torch.zeros(len(texts), self.max_tokens, self.dim)
        for index, text in enumerate(texts):
            token_ids = self._token_ids(text, skip_refused=replacement is not None)
            if token_ids:
                text_1LD = self._embed_tokens(token_ids)[None]
                embeddings_NLD[index, : len(token_ids)] = replace_non_finite(
                    text_1LD, replacement, _not_finite
                )
            num_done = index + 1
            if on_progress and (num_done % BLOCK == 0 or num_done == len(texts)):
                on_progress(num_done, len(texts))
        return embeddings_NLD

    def num_cut(self, texts: Sequence[str]) -> int:
        """Return how many of these texts are longer than L tokens."""
        num_cut = 0
        for text in texts:
            with suppress(SetupError):
                num_cut += bool(self._tokenize(text).overflowing)
        return num_cut

    def _token_ids(self, text: str, *, skip_refused: bool) -> Sequence[int]:
        """Return a text's tokens; none for a blank one or, with `skip_refused`, for one that cannot be encoded."""
        if not text.strip():
            return []
        try:
            return list(self._tokenize(text).ids)
        except SetupError:
            if skip_refused:
                return []
            raise

    def _tokenize(self, text: str) -> Any:
        try:
            return self.tokenizer.encode(text)
        # The library's own error is left out, since its message may quote the private text.
        except Exception:
            raise SetupError(
                "text",
                expected="a text that the tokenizer can encode",
                got="a text that it rejects",
            ) from None

    @torch.no_grad()
    def _embed_tokens(self, token_ids: Sequence[int]) -> Tensor:
        """Return the embeddings of a text of L tokens, shape (L, D)."""
        ids_1L = torch.tensor([token_ids], device=self.device)
        # Every token counts, because a text that is encoded alone has no padding.
        output = self.net(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L))
        hidden_1LD: Tensor = output.last_hidden_state
        return hidden_1LD[0].float().cpu()


def _not_finite() -> NumericalError:
    return NumericalError(
        "text encoder's output",
        expected="finite numbers",
        got="NaN or infinity",
        remedy="Check the weights of the text encoder: they are damaged, or need --dtype float32.",
    )


def pin(folder: Path, *, max_tokens: int, drop: float) -> TextCondition:
    """Pin the encoder in a folder for a plan, by the digests of its files, after opening it once.

    Raises:
        MissingFileError, SetupError, TensorFileError: see `TextEncoder.open`; also a folder without safetensors
            weights, or a network that takes fewer than `max_tokens`.
    """
    names = [CONFIG, TOKENIZER, *weight_files(folder)]
    folder_name = folder.resolve().name
    try:
        files = tuple(_pinned_file(folder, name) for name in names)
        pinned = PinnedEncoder(name=folder_name, files=files)
    except ValueError as error:
        raise SetupError(
            "text encoder",
            expected="a folder whose name has only letters, digits and . _ -",
            got=ascii(folder_name[:80]),
        ) from error
    dim = _open(folder, pinned, max_tokens).dim
    return TextCondition(dim=dim, max_tokens=max_tokens, drop=drop, encoder=pinned)


def pinned_of(condition: TextCondition) -> PinnedEncoder:
    """Return the encoder that a condition pins.

    Raises:
        SetupError: it pins none.
    """
    if condition.encoder is None:
        raise SetupError(
            "text encoder",
            expected="a plan that pins one",
            got="a plan without a text encoder",
            remedy="Pass the embeddings of a text yourself: Ensemble.sample(condition=...).",
        )
    return condition.encoder


def check_files(folder: Path, pinned: PinnedEncoder) -> None:
    """Check a folder against the pinned files without opening the encoder.

    Raises:
        MissingFileError: a file is missing.
        DigestError: a file differs from the pinned one.
    """
    for file in pinned.files:
        digest = sha256_file(_pinned_path(folder, pinned, file))
        if digest != file.digest:
            raise _differs(pinned, file, f"sha256 {digest[:16]}...")


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
    num = len(shards)
    complete_set = [f"model-{number:05}-of-{num:05}.safetensors" for number in range(1, num + 1)]
    if not shards or shards != complete_set:
        got = "no file of these names"
        if shards:
            got = f"{num} shards that are not a complete set"
        raise SetupError(
            str(folder),
            expected="model.safetensors, or model-00001-of-0000N.safetensors to the last",
            got=got,
            remedy="Pickled weights are not read. Convert them: "
            "AutoModel.from_pretrained(...).save_pretrained(folder).",
        )
    return shards


def _pinned_path(folder: Path, pinned: PinnedEncoder, file: File) -> Path:
    """Return the path of a pinned file, links resolved, after checking its length."""
    remedy = f"Bring the folder of {pinned.name} with which the plan was made."
    path = require_file(folder / file.path, f"a file of the text encoder {pinned.name}", remedy)
    # Hugging Face's cache holds links, which the readers of these files would refuse.
    path = path.resolve()
    size = path.stat().st_size
    if size != file.bytes:
        raise _differs(pinned, file, f"{size} bytes")
    return path


def _differs(pinned: PinnedEncoder, file: File, got: str) -> DigestError:
    return DigestError(
        f"text encoder {pinned.name}, {file.path}",
        expected=f"the file that the plan pins, {file.bytes} bytes, sha256 {file.digest[:16]}...",
        got=got,
        remedy=f"Bring the folder of {pinned.name} with which the plan was made: the experts know "
        "only its embeddings.",
    )


def _open(folder: Path, pinned: PinnedEncoder, max_tokens: int) -> TextEncoder:
    """Read every pinned file once, check its digest, and build the network and the tokenizer."""
    small_files, weights = _read_pinned_files(folder, pinned)
    if set(small_files) != {CONFIG, TOKENIZER}:
        raise SetupError(
            f"text encoder {pinned.name}",
            expected=f"{CONFIG} and {TOKENIZER} pinned",
            got=", ".join(sorted(small_files))[:200] or "only weights",
        )
    try:
        with quiet():
            network = _network(json.loads(small_files[CONFIG]), weights)
            tokenizer = _tokenizer(small_files[TOKENIZER], max_tokens)
            return TextEncoder(network, tokenizer, max_tokens)
    except ArchipelagoError:
        raise
    except ImportError as error:
        raise SetupError(
            "texts",
            expected="an installed transformers with all that this network needs",
            got=str(error)[:200],
            remedy="Install it: in Archipelago's repository, pip install '.[text]'.",
        ) from error
    # transformers and torch raise all kinds of errors for settings that fit no network
    except Exception as error:
        raise SetupError(
            f"text encoder {pinned.name}",
            expected=f"a network of transformers that takes {max_tokens} tokens, and all of its weights",
            got=" ".join(f"{type(error).__name__}: {error}".split())[:200],
        ) from error


def _read_pinned_files(
    folder: Path, pinned: PinnedEncoder
) -> tuple[dict[str, bytes], dict[str, Tensor]]:
    """Return the bytes of the small files and all weights; what is hashed is what is used."""
    small_files: dict[str, bytes] = {}
    weights: dict[str, Tensor] = {}
    for file in pinned.files:
        path = _pinned_path(folder, pinned, file)
        if file.path.endswith(".safetensors"):
            try:
                weights |= load_tensors(path, None, max_bytes=_MAX_WEIGHT_BYTES, digest=file.digest)
            except DigestError as error:
                raise _differs(pinned, file, f"a file of {error.got}") from error
            continue
        content = read_bounded(path, _MAX_SMALL_BYTES)
        digest = sha256_hex(content)
        if digest != file.digest:
            raise _differs(pinned, file, f"sha256 {digest[:16]}...")
        small_files[file.path] = content
    return small_files, weights


def _network(settings: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
    """Build the text encoder of a network, from settings and weights only."""
    config, model_class = _text_tower(settings)
    if settings.get("quantization_config") or getattr(config, "quantization_config", None):
        # Transformers reads them with code that it would download.
        raise ValueError("its weights are quantized")
    config.use_cache = False
    dtype = torch.float32
    if device_named().type == "cuda":
        # Not float16, in which T5 overflows.
        dtype = torch.bfloat16
    net: nn.Module
    net, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
    )
    # The pooler is not used, and many published files lack its weights.
    missing = [name for name in report["missing_keys"] if not name.startswith("pooler.")]
    problems = [*missing, *report["mismatched_keys"], *report["error_msgs"]]
    if problems:
        raise ValueError(f"{len(problems)} weights are missing or of another shape")
    return net


def _text_tower(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the configuration and the class of the text encoder.

    CLIP and others have one tower per kind of input. Only the text tower is configured, since the settings of another
    may name a network as its backbone, which transformers would look up and download.
    """
    from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING, AutoConfig

    config_class = _config_class(settings)
    if "text_config" in config_class.sub_configs:
        settings = settings.get("text_config") or {}
        config_class = config_class.sub_configs["text_config"]
        if config_class is AutoConfig:
            config_class = _config_class(settings)

    is_text_encoder = config_class in MODEL_FOR_TEXT_ENCODING_MAPPING
    if is_text_encoder:
        mapping = MODEL_FOR_TEXT_ENCODING_MAPPING
    else:
        mapping = MODEL_MAPPING
    model_class: Any = mapping.get(config_class, None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    takes_texts = model_class is not None and model_class.main_input_name == "input_ids"
    if not takes_texts or AutoConfig in config_class.sub_configs.values():
        raise ValueError(f"transformers has no {config_class.model_type} that takes texts only")

    config = config_class.from_dict(settings)
    if config.is_encoder_decoder and not is_text_encoder:
        raise ValueError(f"transformers has no separate encoder for {config_class.model_type}")
    return config, model_class


def _config_class(settings: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    if settings.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(f"{CONFIG} names no model_type that transformers knows")
    return CONFIG_MAPPING[settings["model_type"]]


def _tokenizer(data: bytes, max_tokens: int) -> Any:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    # The library raises plain exceptions.
    except Exception as error:
        raise ValueError(f"{TOKENIZER} does not parse as a tokenizer") from error
    num_special = tokenizer.num_special_tokens_to_add(is_pair=False)
    if num_special >= max_tokens:
        raise ValueError(
            f"the tokenizer adds {num_special} special tokens to each text, of at most {max_tokens}"
        )
    # Whatever the file states: padding would be embedded as if it were part of the text.
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    return tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers."""
    with warnings.catch_warnings():
        # Third-party imports warn.
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        level = logging.get_verbosity()
        had_bars = logging.is_progress_bar_enabled()
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if had_bars:
                logging.enable_progress_bar()

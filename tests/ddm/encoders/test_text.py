"""The text encoder's door: what comes out, what is read to get it, and what is refused."""

import json
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, normalizers, processors

from ddm.cli.conditions import encode_text
from ddm.encoders.text import TextEncoder, check_files, pin
from ddm.errors import DigestError, MissingFileError, SetupError, ShapeError, TensorFileError
from ddm.protocol.architecture import TextCondition
from ddm.protocol.plan import Plan
from tests.support.case import case
from tests.support.documents import plan_document, to_bytes
from tests.support.errors import has_subject
from tests.support.text_encoders import DIM, make_encoder, save_encoder

L = 5
SHORT = "bright left"
LONG = "bright left dark right bright left"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(
        tmp_path_factory.mktemp("encoders") / "tiny-t5", make_encoder("T5EncoderModel")
    )


@pytest.fixture(scope="module")
def condition(folder: Path) -> TextCondition:
    return pin(folder, max_tokens=L, drop=0.1)


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize(
    "kind", ["T5EncoderModel", "T5Model", "CLIPModel", "BertModel", "LlamaModel", "FNetModel"]
)
def test_vectors_are_what_the_network_itself_answers_and_zero_beyond(
    kind: str, tmp_path: Path
) -> None:
    net = make_encoder(kind)
    encoder = TextEncoder.open(
        tmp_path / "e", pin(save_encoder(tmp_path / "e", net), max_tokens=L, drop=0.0)
    )
    tower = {"T5Model": "encoder", "CLIPModel": "text_model"}.get(kind)
    with torch.no_grad():
        wanted = (getattr(net, tower) if tower else net)(
            torch.tensor([[3, 5, 1]])
        ).last_hidden_state[0]
    states = encoder.encode([SHORT, LONG])
    torch.testing.assert_close(states[0, :3], wanted, atol=1e-5, rtol=1e-4)
    assert not states[0, 3:].any() and states[1].any(-1).all()
    assert states.shape == (2, L, DIM) and encoder.dim == DIM
    assert not torch.allclose(states[0, :2], states[1, :2]) or kind in (
        "CLIPModel",
        "LlamaModel",
    ), "causal ones look back"


def test_vectors_do_not_depend_on_the_texts_beside_and_blank_texts_are_none(
    folder: Path, condition: TextCondition
) -> None:
    encoder = TextEncoder.open(folder, condition)
    calls = []
    texts = [LONG, "", SHORT, "  \n", "dark"] * 30
    together = encoder.encode(texts, lambda num_done, total: calls.append((num_done, total)))
    assert calls == [(64, 150), (128, 150), (150, 150)]
    for number, text in enumerate(texts[:5]):
        torch.testing.assert_close(together[number], encoder.encode([text])[0])
        assert torch.equal(together[number].any(), torch.tensor(bool(text.strip())))
    torch.testing.assert_close(together[:5], together[145:])
    assert encoder.encode([]).shape == (0, L, DIM) and not encoder.encode([" "]).any()


@pytest.mark.parametrize("kind", ["T5EncoderModel", "CLIPModel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_vectors_are_the_same_bits_whatever_the_texts_beside_are(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Private training hides a patient by the noise on its own gradient; its caption must not change others' inputs."""
    mine = save_encoder(tmp_path / "e", make_encoder(kind))
    opened = TextEncoder.open(mine, pin(mine, max_tokens=8, drop=0.0))
    encoder = TextEncoder(opened.net.to(dtype), opened.tokenizer, 8)
    others = ["dark", "bright left", "", "left dark right", LONG]
    wanted = [encoder.encode([text])[0] for text in others]
    for own in ("right", f"{LONG} {LONG}", "", " \n"):
        for texts in ([own, *others], [own] * 3 + others, [own] * 70 + others):
            states = encoder.encode(texts)[-len(others) :]
            with case(own, len(texts)):
                assert all(
                    torch.equal(one, alone) for one, alone in zip(states, wanted, strict=True)
                )
    assert all(
        states_alone.any() for text, states_alone in zip(others, wanted, strict=True) if text
    )


def test_text_that_is_too_long_is_cut_and_counted(folder: Path, condition: TextCondition) -> None:
    encoder = TextEncoder.open(folder, condition)
    assert encoder.num_cut([SHORT, LONG, ""]) == 1
    assert torch.equal(
        encoder.encode([LONG]), encoder.encode(["bright left dark right dark dark dark"])
    )
    assert not torch.equal(encoder.encode([LONG]), encoder.encode(["bright left dark left"]))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_another_file_than_the_pinned_one_is_refused(
    name: str, folder: Path, condition: TextCondition, tmp_path: Path
) -> None:
    mine = copied(folder, tmp_path / "mine")
    pinned = condition.encoder
    assert pinned is not None
    check_files(mine, pinned)
    data = bytearray((mine / name).read_bytes())
    data[-3] ^= 1
    for changed in (bytes(data), bytes(data) + b" "):
        (mine / name).write_bytes(changed)
        for refuse in (
            lambda: TextEncoder.open(mine, condition),
            lambda: check_files(mine, pinned),
        ):
            with pytest.raises(DigestError, check=has_subject(f"tiny-t5, {name}")):
                refuse()
    (mine / name).unlink()
    for refuse in (lambda: TextEncoder.open(mine, condition), lambda: check_files(mine, pinned)):
        with pytest.raises(MissingFileError):
            refuse()


def test_nothing_but_the_pinned_files_is_read_no_code_runs_and_no_network_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = save_encoder(tmp_path / "mine", make_encoder("T5EncoderModel"))
    ran = tmp_path / "ran"
    settings = json.loads((mine / "config.json").read_text())
    settings["auto_map"] = dict.fromkeys(
        ("AutoConfig", "AutoModel", "AutoModelForTextEncoding"), "evil.Evil"
    )
    settings["attn_implementation"] = "kernels-community/evil"  # code that transformers would fetch
    (mine / "config.json").write_text(json.dumps(settings))
    (mine / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    for name in (
        "pytorch_model.bin",
        "tokenizer_config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    ):
        (mine / name).write_bytes(b"\x80\x04 not to be read")

    def refuse(*anything: object, **more: object) -> None:
        raise AssertionError("the network was asked")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    condition = pin(mine, max_tokens=L, drop=0.1)
    assert TextEncoder.open(mine, condition).encode([SHORT]).any()
    assert condition.encoder is not None
    assert {file.path for file in condition.encoder.files} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert not ran.exists()
    elsewhere = {
        "model_type": "dpt",
        "backbone": "facebook/dinov2-small",
        "use_pretrained_backbone": True,
    }
    for config in (
        elsewhere,
        elsewhere | {"model_type": "tvp"},
        {"model_type": "llava", "vision_config": elsewhere},
    ):
        (mine / "config.json").write_text(json.dumps(config))
        with pytest.raises(SetupError, check=has_subject("text encoder mine")):
            pin(mine, max_tokens=L, drop=0.1)
    with pytest.raises(AssertionError, match="network"):
        socket.create_connection(("127.0.0.1", 9))


def test_shards_are_one_network_and_a_part_of_them_is_refused(
    folder: Path, condition: TextCondition, tmp_path: Path
) -> None:
    whole = make_encoder("T5EncoderModel").state_dict()
    mine = copied(folder, tmp_path / "mine")
    names = sorted(whole)
    (mine / "model.safetensors").unlink()
    for number, part in enumerate((names[:4], names[4:]), 1):
        tensors = {name: whole[name].clone() for name in part}
        save_file(tensors, mine / f"model-0000{number}-of-00002.safetensors")
    sharded = TextEncoder.open(mine, pin(mine, max_tokens=L, drop=0.0)).encode([LONG])
    assert torch.equal(sharded, TextEncoder.open(folder, condition).encode([LONG]))
    (mine / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SetupError, check=has_subject("mine")):
        pin(mine, max_tokens=L, drop=0.0)


def test_pickled_incomplete_and_infinite_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    mine = copied(folder, tmp_path / "mine")
    whole = make_encoder("T5EncoderModel").state_dict()
    weights = mine / "model.safetensors"
    lost = next(name for name in whole if name.endswith("wo.weight"))
    save_file({name: value.clone() for name, value in whole.items() if name != lost}, weights)
    with pytest.raises(SetupError, check=has_subject("text encoder mine")):
        pin(mine, max_tokens=L, drop=0.0)
    save_file(
        {name: value.clone() for name, value in whole.items()} | {lost: whole[lost] / 0}, weights
    )
    with pytest.raises(
        TensorFileError,
        check=has_subject("tensor encoder.block.0.layer.1.DenseReluDense.wo.weight"),
    ):
        pin(mine, max_tokens=L, drop=0.0)
    torch.save(whole, weights)
    with pytest.raises(TensorFileError, match="pickle"):
        pin(mine, max_tokens=L, drop=0.0)
    weights.write_bytes(b"")
    with pytest.raises(SetupError, check=has_subject("text encoder, model.safetensors")):
        pin(mine, max_tokens=L, drop=0.0)
    weights.rename(mine / "pytorch_model.bin")
    with pytest.raises(SetupError, check=has_subject("mine")) as caught:
        pin(mine, max_tokens=L, drop=0.0)
    assert "save_pretrained" in caught.value.remedy


def test_weights_without_the_pooler_that_many_publish_none_of_are_whole(tmp_path: Path) -> None:
    net = make_encoder("BertModel")
    mine = save_encoder(tmp_path / "mine", net)
    wanted = TextEncoder.open(mine, pin(mine, max_tokens=L, drop=0.0)).encode([LONG])
    without = {
        name: value.clone()
        for name, value in net.state_dict().items()
        if not name.startswith("pooler.")
    }
    assert len(without) < len(net.state_dict())
    save_file(without, mine / "model.safetensors")
    assert torch.equal(
        TextEncoder.open(mine, pin(mine, max_tokens=L, drop=0.0)).encode([LONG]), wanted
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"pad_token_id": 99},
        {"num_attention_heads": 0},
        {"hidden_size": "8"},
        {"hidden_act": "no such"},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_make_no_network_are_refused_in_one_line(
    settings: dict[str, object], tmp_path: Path
) -> None:
    mine = save_encoder(tmp_path / "mine", make_encoder("BertModel"))
    config = json.loads((mine / "config.json").read_text())
    (mine / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(SetupError, match="a network of transformers") as caught:
        pin(mine, max_tokens=L, drop=0.0)
    assert "\n" not in caught.value.got


def test_so_few_tokens_that_none_is_left_for_words_are_refused(folder: Path) -> None:
    assert pin(folder, max_tokens=2, drop=0.0).max_tokens == 2
    with pytest.raises(SetupError, check=has_subject("text encoder tiny-t5")):
        pin(folder, max_tokens=1, drop=0.0)


def test_networks_that_read_no_text_or_not_so_much_of_it_are_refused(tmp_path: Path) -> None:
    bart = save_encoder(tmp_path / "bart", make_encoder("BartModel"))
    bert = save_encoder(tmp_path / "bert", make_encoder("BertModel"))
    with pytest.raises(SetupError, match="a network of transformers"):
        pin(bart, max_tokens=L, drop=0.0)
    pin(bert, max_tokens=12, drop=0.0)
    with pytest.raises(SetupError, check=has_subject("text encoder bert")):
        pin(bert, max_tokens=13, drop=0.0)
    (bert / "config.json").write_text('{"model_type": "nothing that exists"}')
    with pytest.raises(SetupError):
        pin(bert, max_tokens=12, drop=0.0)


def test_encoder_of_another_width_than_the_plans_and_a_plan_without_one_are_refused(
    folder: Path, condition: TextCondition
) -> None:
    with pytest.raises(ShapeError, check=has_subject("text encoder tiny-t5")):
        TextEncoder.open(folder, condition.model_copy(update={"dim": 9}))
    with pytest.raises(SetupError, check=has_subject("text encoder")):
        TextEncoder.open(folder, condition.model_copy(update={"encoder": None}))


def test_text_that_the_tokenizer_does_not_know_is_refused_without_saying_it(tmp_path: Path) -> None:
    mine = save_encoder(tmp_path / "mine", make_encoder("T5EncoderModel"), unknown=None)
    encoder = TextEncoder.open(mine, pin(mine, max_tokens=L, drop=0.0))
    with pytest.raises(SetupError) as caught:
        encoder.encode(["bright", "Ms Miller"])
    assert "Miller" not in f"{caught.value} {caught.value.remedy}"
    assert caught.value.__suppress_context__


def test_prompt_of_which_the_tokenizer_leaves_nothing_is_refused_and_not_drawn_without_a_text(
    tmp_path: Path,
) -> None:
    mine = save_encoder(tmp_path / "mine", make_encoder("T5EncoderModel"))
    tokenizer = Tokenizer.from_file(str(mine / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Replace("~", "")
    # nothing at the end
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.save(str(mine / "tokenizer.json"))
    condition = pin(mine, max_tokens=L, drop=0.0)
    assert (
        isinstance(states := encode_text("~bright", mine, condition), torch.Tensor) and states.any()
    )
    with pytest.raises(SetupError, check=has_subject("--text")):
        encode_text("~~", mine, condition)


def test_pinned_encoder_survives_the_encoding_of_a_plan(condition: TextCondition) -> None:
    fields = json.loads(condition.model_dump_json())
    plan = Plan.parse(to_bytes(plan_document(condition=fields)), subject="plan")
    assert plan.condition == condition
    assert Plan.parse(plan.encode(), subject="plan").condition == condition

"""Bad config.json files and pairs: tapped layers, rotary embedding, vocabulary, mask id, fields in two places, broken JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.bad_checkpoints import CONFIG, GENERATION, GOOD, INDEX, Bad, rewritten
from tests.support.checkpoints import target_config, write_drafter

Config = dict[str, Any]
NEST = "dflash_config"


def _top(**fields: Any) -> Callable[[Path], None]:
    return rewritten(CONFIG, lambda config: config.update(fields))


def _nested(**fields: Any) -> Callable[[Path], None]:
    """Fields of the drafter's own, where public checkpoints keep them."""
    return rewritten(CONFIG, lambda config: config[NEST].update(fields))


def _layers() -> Iterator[Bad]:
    """The target has layers 0..3; the drafter taps 0 and 2, so `fc` reads two."""
    for label, ids, items in (
        ("the number of layers", [0, 4], ("target_layer_ids", "[0, 4]", "[0, 4)")),
        ("hidden_states numbering", [1, 4], ("target_layer_ids", "[1, 4]", "hidden_states")),
        ("far outside", [0, 2**31 - 1], ("target_layer_ids", str(2**31 - 1))),
        ("from the end", [-1, 2], ("target_layer_ids", "non-negative", "[-1, 2]")),
        ("in falling order", [2, 0], ("target_layer_ids must rise", "[2, 0]")),
        ("one twice", [2, 2], ("target_layer_ids must rise", "[2, 2]")),
        ("one too many", [0, 1, 2], ("misshapen: fc.weight", "[32, 96]", "[32, 64]")),
        ("one too few", [2], ("misshapen: fc.weight", "[32, 32]", "[32, 64]")),
        ("none", [], ("at least one target layer",)),
        ("floats", [0.0, 2.0], ("target_layer_ids", "list of non-negative integers")),
        ("text", "0,2", ("target_layer_ids", "'0,2'")),
        ("a number", 2, ("target_layer_ids", "found 2")),
        ("nested", [[0, 2]], ("target_layer_ids", "[[0, 2]]")),
        ("a million", list(range(10**6)), ("target_layer_ids",)),
    ):
        yield Bad(f"layers/{label}", "drafter", _nested(target_layer_ids=ids), ("/drafter", *items))
    for count, ids in ((3, [0, 2]), (5, [0, 2]), (5, [0, 4]), (36, [0, 2])):
        mutate = rewritten(
            CONFIG, lambda c, count=count, ids=ids: [c.update(num_target_layers=count), c[NEST].update(target_layer_ids=ids)]
        )
        items = (f"num_target_layers: drafter was trained on {count}, target has 4",)
        yield Bad(f"layers/of a target of {count}, {ids}", "drafter", mutate, items, error="PairingError")
    for count in (0, -1, 2.0, "4", True, [4], 2**40):
        yield Bad(
            f"layers/num_target_layers {count!r}", "drafter", _top(num_target_layers=count), ("num_target_layers must be an integer",)
        )
    for count in (3, 5, 1024, 2**31 - 1):
        items = ("layers.3." if count == 3 else "layers.4." if count == 5 else str(count),)
        yield Bad(f"layers/target of {count}", "target", _top(num_hidden_layers=count), items)
    yield Bad("layers/drafter of 2", "drafter", _top(num_hidden_layers=2), ("missing: layers.1.mlp.up_proj.weight",))


_YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3: Config = _YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# Fields of config.json, whose rope_theta is 10000, and what the message must name.
_ROPES: dict[str, tuple[Config, tuple[str, ...]]] = {
    **{f"theta {theta!r}": ({"rope_theta": theta}, ("rope_theta must be",)) for theta in (0, -1e4, 1, "1e4", [1e4], True)},
    "theta beyond floats": ({"rope_theta": 10**400}, ("rope_theta", "finite")),
    "theta of rope_parameters": ({"rope_parameters": {"rope_theta": 1e6}}, ("contradiction", "rope_parameters.rope_theta is 1000000.0")),
    "theta of rope_scaling": ({"rope_scaling": {"rope_theta": 1e6}}, ("contradiction", "rope_scaling.rope_theta", "rope_theta is 10000.0")),
    "two types": (
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_scaling": _YARN},
        ("contradiction", "rope_parameters.rope_type is 'linear'", "rope_scaling.rope_type is 'yarn'"),
    ),
    "two factors": (
        {"rope_parameters": _YARN, "rope_scaling": _YARN | {"factor": 2.0}},
        ("contradiction", "rope_parameters.factor is 4.0", "rope_scaling.factor is 2.0"),
    ),
    "two lengths": (
        {"rope_parameters": _YARN, "rope_scaling": {"original_max_position_embeddings": 64}},
        ("contradiction", "rope_parameters.original_max_position_embeddings is 128", "is 64"),
    ),
    **{
        f"type {kind!r}": ({"rope_scaling": {"rope_type": kind, "factor": 2.0}}, (repr(kind), "default, linear, llama3, yarn"))
        for kind in ("dynamic", "su", "longrope", "ntk", "mrope", "proportional", "YARN", "", 1, ["yarn"], {})
    },
    **{f"factor {factor!r}": ({"rope_scaling": _YARN | {"factor": factor}}, ("factor", repr(factor))) for factor in (0, -4, 0.5, "4")},
    **{f"rope_scaling {value!r}": ({"rope_scaling": value}, ("rope_scaling must be an object",)) for value in ("yarn", 4)},
    **{f"rope_parameters {value!r}": ({"rope_parameters": value}, ("rope_parameters must be an object",)) for value in ([], True)},
    "factor without a type": ({"rope_scaling": {"factor": 4.0}}, ("rope_type / type is missing",)),
    "type without a factor": ({"rope_scaling": {"rope_type": "yarn"}}, ("factor is missing", "original_max_position_embeddings")),
    "yarn of no length": ({"rope_scaling": _YARN | {"original_max_position_embeddings": 0}}, ("original_max_position", "found 0")),
    "yarn with its betas swapped": ({"rope_scaling": _YARN | {"beta_fast": 1, "beta_slow": 32}}, ("beta_fast", "beta_slow", "32")),
    "yarn with negative attention": ({"rope_scaling": _YARN | {"attention_factor": -1.0}}, ("attention_factor", "-1.0")),
    "yarn of another truncation": ({"rope_scaling": _YARN | {"truncate": False}}, ("truncate is false",)),
    "llama3 with equal factors": ({"rope_scaling": _LLAMA3 | {"low_freq_factor": 4.0}}, ("< high_freq_factor", "4.0 and 4.0")),
    "llama3 with a negative factor": ({"rope_scaling": _LLAMA3 | {"low_freq_factor": -1.0}}, ("low_freq_factor", "-1.0")),
    "a part of each head": ({"partial_rotary_factor": 0.25}, ("partial_rotary_factor is 0.25",)),
    "a part in rope_parameters": ({"rope_parameters": {"partial_rotary_factor": 0.25}}, ("partial_rotary_factor is 0.25",)),
    "by type of layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ("rope_parameters.full_attention",)),
    "by modality": ({"rope_scaling": {"mrope_section": [16, 24, 24]}}, ("rope_scaling.mrope_section is not supported",)),
}


def _ropes() -> Iterator[Bad]:
    for index, (label, (fields, items)) in enumerate(_ROPES.items()):
        culprit = ("target", "drafter")[index % 2]
        yield Bad(f"rope/{culprit} {label}", culprit, _top(**fields), (f"{culprit}/{CONFIG}", *items))


def _vocabularies() -> Iterator[Bad]:
    for size in (299, 301, 320, 2**31 - 1):
        items = ("misshapen: model.embed_tokens.weight", f"expected [{size}, 32], found [300, 32]")
        yield Bad(f"vocabulary/target of {size}", "target", _top(vocab_size=size), items, base="untied")
        items = ("misshapen: embed_proj.2.weight", f"expected [{size}, 8], found [300, 8]")
        mutate = rewritten(CONFIG, lambda config, size=size: [config.update(vocab_size=size), config[NEST].update(mask_token_id=7)])
        yield Bad(f"vocabulary/drafter of {size}", "drafter", mutate, items)
    for size in (0, -300, 2**31, 300.0, "300", True, [300], None):
        yield Bad(f"vocabulary/target of {size!r}", "target", _top(vocab_size=size), ("vocab_size",))
        yield Bad(f"vocabulary/drafter of {size!r}", "drafter", _top(vocab_size=size), ("vocab_size",))
    # A vocabulary padded to a multiple of 64, as public targets have it: 320 rows for 300 tokens.
    unpadded = ("misshapen: model.embed_tokens.weight, expected [300, 32], found [320, 32]",)
    yield Bad("vocabulary/target unpadded in its config", "target", _top(vocab_size=300), unpadded, base="padded")
    items = ("vocab_size: drafter 300, target 320", "padding")
    yield Bad("vocabulary/drafter without the target's padding", "drafter", _exchanged("plain"), items, base="padded", error="PairingError")
    items = ("vocab_size: drafter 320, target 300", "padding")
    yield Bad("vocabulary/drafter with padding of its own", "drafter", _exchanged("padded"), items, error="PairingError")
    yield Bad("vocabulary/drafter of a part", "drafter", _top(draft_vocab_size=100), ("draft_vocab_size is 100",))
    for name in ("eos_token_id", "bos_token_id"):
        yield Bad(f"vocabulary/{name} beyond it", "target", _top(**{name: 300}), (name[:3], "300"))
    many = rewritten(GENERATION, lambda config: config.update(eos_token_id=list(range(10**6))))
    yield Bad("vocabulary/a million end tokens beyond it", "target", many, ("eos token id 300", "more"))


def _exchanged(base: str) -> Callable[[Path], None]:
    """The drafter of another good pair in the place of this one."""

    def mutate(folder: Path) -> None:
        target, drafter = GOOD[base]
        shutil.rmtree(folder)
        write_drafter(folder, target_config(**target), num_hidden_layers=1, **drafter)

    return mutate


def _masks() -> Iterator[Bad]:
    for value in (300, 320, 2**31 - 1, -1, 299.0, "299", True, [299], {}, None):
        items = (f"drafter/{CONFIG}", "mask_token_id")
        yield Bad(f"mask/{value!r}", "drafter", _nested(mask_token_id=value), items)
        yield Bad(f"mask/flat {value!r}", "drafter", _top(mask_token_id=value), items, base="flat")
    for label, value in (("bos", 0), ("eos", 2)):
        items = (f"mask_token_id: {value}", label)
        yield Bad(f"mask/the target's {label}", "drafter", _nested(mask_token_id=value), items, error="PairingError")
    second = rewritten(GENERATION, lambda config: config.update(eos_token_id=[2, 299]))
    yield Bad("mask/an end of generation_config.json", "target", second, ("mask_token_id: 299", "eos"), error="PairingError")


def _places() -> Iterator[Bad]:
    """Each field of the drafter's own a second time, elsewhere, with another value."""
    others: Config = {
        "projector_type": "causal_v5",
        "mask_token_id": 298,
        "target_layer_ids": [0, 3],
        "shift_label": False,
        "pure_draft_prefix_len": 2,
        "emb_dim": 16,
        "gru_hidden_dim": 32,
    }
    for name, value in others.items():
        items = ("contradiction", f"dflash_config.{name} is", f", {name} is")
        yield Bad(f"places/{name} at top level too", "drafter", _top(**{name: value}), items)
        items = ("contradiction", f"dflash_config.{name} is", f"domino_config.{name} is")
        yield Bad(f"places/{name} under both names", "drafter", _top(domino_config={name: value}), items)
        items = ("contradiction", f"dflash_config.{name} is", f", {name} is")
        yield Bad(f"places/{name} nested too", "drafter", _top(**{NEST: {name: value}}), items, base="flat")
    for name, value in {"block_size": 8, "num_target_layers": 5}.items():
        yield Bad(f"places/{name} nested too", "drafter", _nested(**{name: value}), ("contradiction", f"dflash_config.{name} is {value}"))
    for name, value in (("shift_label", 1), ("pure_draft_prefix_len", True)):
        yield Bad(f"places/{name} as {value!r}", "drafter", _top(**{name: value}), ("contradiction", name))
    for name, value in {"hidden_size": 32, "rope_theta": 1e4, NEST: {}, "\x1b[2J": 1, "\ud800": 1, "n" * 2**20: 1}.items():
        items = (NEST, "is not supported", ascii(name)[1:5])
        yield Bad(f"places/{ascii(name)[:20]} in the nest", "drafter", _nested(**{name: value}), items)
    keys = {f"k{number}": 0 for number in range(300_000)}
    yield Bad("places/300000 keys in the nest", "drafter", _nested(**keys), ("dflash_config.k0", "more"))
    yield Bad("places/300000 keys of rope", "target", _top(rope_scaling=keys), ("rope_scaling.k0", "more"))
    for value in ([], "domino", 1, True):
        yield Bad(f"places/nest {value!r}", "drafter", _top(**{NEST: value}), (f"{NEST} must be an object",))
    for kind in ("v2", "Domino", "dflash", "", 1, ["domino"], "n" * 2**20):
        yield Bad(f"places/projector_type {str(kind)[:9]}", "drafter", _nested(projector_type=kind), ("projector_type",))
    dropped = rewritten(CONFIG, lambda config: config[NEST].pop("projector_type"))
    yield Bad("places/no projector_type", "drafter", dropped, ("projector_type is absent", "must never run as plain DFlash"))
    head = _top(emb_dim=8)
    yield Bad("places/a head's field of a plain drafter", "drafter", head, ("emb_dim says Domino",), base="dflash")
    for name in ("shift_label", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"):
        dropped = rewritten(CONFIG, lambda config, name=name: config[NEST].pop(name))
        yield Bad(f"places/{name} nowhere", "drafter", dropped, (f"{name} is missing", NEST, "top level"))
    for size in (0, 1, -6, 6.0, "6", 10**6, 2**31 - 1, 2**40):
        yield Bad(f"places/block_size {size!r}", "drafter", _top(block_size=size), ("block_size",))
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        for size in (0, 2**31, 2**31 - 2):
            if (name, size) != ("max_position_embeddings", 2**31 - 2):
                yield Bad(f"places/{name} {size}", "target", _top(**{name: size}), (_NAMED[name] if size == 2**31 - 2 else name,))
    many = ["sliding_attention"] * 500_000
    yield Bad("places/a million layer types", "target", _top(layer_types=many), ("layer_types",))
    yield Bad("places/a million layer types of a drafter", "drafter", _top(layer_types=many), ("layer_types", "500000"))
    yield Bad(
        "places/a million architectures", "target", _top(architectures=["DraftModel"] * 10**6), ("expected a target, found a drafter",)
    )
    yield Bad("places/a million other architectures", "drafter", _top(architectures=["x"] * 10**6), ("architectures", "DominoDraftModel"))


# A size that the tensors contradict is named by the first tensor of it, or by the quotient that does not come out.
_NAMED = {
    "hidden_size": "model.norm.weight",
    "intermediate_size": "mlp.up_proj.weight",
    "num_attention_heads": "self_attn.q_proj.weight",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "self_attn.q_proj.weight",
}


def _jsons() -> Iterator[Bad]:
    def changed(change: Callable[[bytes], bytes], file: str = CONFIG) -> Callable[[Path], object]:
        return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes() if (folder / file).exists() else b""))

    for label, change, item in (
        ("a key twice", lambda text: text.replace(b"{", b'{"vocab_size": 300,', 1), "duplicate key(s) 'vocab_size'"),
        ("a nested key twice", lambda text: text[:-1] + b', "x": {"y": 1, "y": 1}}', "duplicate key(s) 'y'"),
        ("NaN", lambda text: text.replace(b"1e-06", b"NaN"), "NaN"),
        ("Infinity", lambda text: text.replace(b"10000.0", b"Infinity"), "Infinity"),
        ("a comment", lambda text: b"// config\n" + text, "valid JSON"),
        ("a comma too many", lambda text: text[:-1] + b",}", "valid JSON"),
        ("single quotes", lambda text: text.replace(b'"', b"'"), "valid JSON"),
        ("cut short", lambda text: text[:-2], "valid JSON"),
        ("two objects", lambda text: text + text, "valid JSON"),
        ("a byte order mark", lambda text: b"\xef\xbb\xbf" + text, "valid JSON"),
        ("UTF-16", lambda text: text.decode().encode("utf-16"), "valid JSON"),
        ("Latin-1", lambda text: text[:-1] + b', "author": "\xe9"}', "valid JSON"),
        ("zeros at the end", lambda text: text + bytes(9), "valid JSON"),
        ("zeros all over", lambda text: bytes(len(text)), "valid JSON"),
        ("a list", lambda text: b"[" + text + b"]", "found list"),
        ("a string", lambda text: json.dumps(text.decode()).encode(), "found str"),
        ("nothing", lambda text: b"", "valid JSON"),
    ):
        culprit = ("drafter", "target")[label < "b"]
        yield Bad(f"json/{label}", culprit, changed(change), (f"{culprit}/{CONFIG}", item))
    twice = changed(lambda text: text.replace(b'"model.norm.weight":', b'"model.norm.weight": "x", "model.norm.weight":', 1), INDEX)
    yield Bad("json/a tensor twice in the index", "target", twice, (INDEX, "duplicate key(s) 'model.norm.weight'"), base="sharded")
    for value in ({}, [], None, "x", {"a": 1}, {"a": None}, {"a": {"b": "c"}}):
        mutate = rewritten(INDEX, lambda index, value=value: index.update(weight_map=value))
        yield Bad(f"json/weight_map {value!r}", "target", mutate, (INDEX, "weight_map"), base="sharded")
    twice = changed(lambda text: b'{"eos_token_id": 2, "eos_token_id": 3}', GENERATION)
    yield Bad("json/generation_config.json with a key twice", "target", twice, (GENERATION, "duplicate key(s) 'eos_token_id'"))


CONFIGS: tuple[Bad, ...] = (*_layers(), *_ropes(), *_vocabularies(), *_masks(), *_places(), *_jsons())

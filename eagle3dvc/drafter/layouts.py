"""The two layouts that engines load, and one description of a drafter between them.

`speculators` is the layout of vLLM: a `config.json` with `speculators_model_type` and the decoder in
`transformer_layer_config`; `sglang` is the EAGLE layout: `LlamaForCausalLMEagle3`, the decoder's keys at top level.
They differ in more than names: layer ids (vLLM's id k is the state after k layers, SGLang's n is "after layer n", that
is k = n + 1), rope keys, and in what they can say at all. `unrepresentable` lists what a layout would lose, and `write`
refuses to lose it. docs/export.md is the table of all this.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3dvc.errors import UserError
from eagle3dvc.params import MOST_DRAFT_TOKENS

if TYPE_CHECKING:
    import torch

SPECULATORS = "speculators"
SGLANG = "sglang"
LAYOUTS = (SPECULATORS, SGLANG)
ALGORITHM = "eagle3"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SPECULATORS_VERSION = "0.9.0"  # of the layout written, not of the installed package: same inputs, same bytes
WEIGHTS = "model.safetensors"
DTYPES = ("float32", "bfloat16", "float16")  # that engines compute a drafter in
# decoder keys that say nothing about the drafter's arithmetic, and that writers add as they please
_NOISE = {
    *("_name_or_path", "_attn_implementation", "architectures", "auto_map", "dtype", "torch_dtype", "pretraining_tp"),
    *("transformers_version", "use_cache", "tie_word_embeddings", "num_aux_hidden_states", "return_dict"),
}
_SGLANG_OWN = {"draft_vocab_size", "eagle_config", "target_hidden_size", "rope_theta", "rope_scaling", "eagle3dvc"}
_MOST_LAYERS = 256  # of a draft decoder; a number beyond it is a slip, and would cost memory before any tensor is looked at
_SKIPPED = {"verifier_norm.weight", "verifier_lm_head.weight"}  # the verifier's own, never part of a drafter
_BARE = {"lm_head.weight", "d2t", "t2d"}  # names that SGLang does not find behind `model.`


@dataclass(frozen=True)
class Drafter:
    """An EAGLE-3 drafter outside any layout.

    tensors: speculators' names (`fc.weight`, `layers.0.self_attn.q_proj.weight`, ..., `lm_head.weight`, `norm.weight`;
        with a pruned vocabulary `d2t` int64 [draft vocabulary] of offsets, target id = draft id + offset, and `t2d` bool
        [vocabulary]; `embed_tokens.weight` only where it is not the verifier's own).
    decoder: keys of the decoder's Llama or Qwen3 configuration, rope in `rope_parameters`.
    aux_layer_ids: vLLM's convention, id k = residual stream after k decoder layers.
    """

    tensors: dict[str, torch.Tensor] = field(repr=False)
    decoder: dict[str, Any]
    aux_layer_ids: tuple[int, ...]
    draft_vocab_size: int
    verifier: str
    verifier_architectures: tuple[str, ...] = ()
    speculative_tokens: int = 3
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def vocab_size(self) -> int:
        return self.decoder["vocab_size"]

    @property
    def pruned(self) -> bool:
        """Whether the draft vocabulary is a part of the verifier's."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def sliding(self) -> bool:
        return "sliding_attention" in (self.decoder.get("layer_types") or ())


def expected_tensors(d: Drafter) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that vLLM's loader needs for this drafter (source: vllm llama_eagle3.py)."""
    c = d.decoder
    hidden, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    head, inner = c["head_dim"], c["intermediate_size"]
    states = len(d.aux_layer_ids) * (d.target_hidden_size or hidden)
    want = {"fc.weight": (hidden, states), "norm.weight": (hidden,), "lm_head.weight": (d.draft_vocab_size, hidden)}
    if d.pruned:
        want |= {"d2t": (d.draft_vocab_size,), "t2d": (d.vocab_size,)}
    if d.norm_before_fc:
        want["input_norm.weight"] = (states,)
    if d.fc_norm:
        n = len(d.aux_layer_ids)
        want |= {f"fc_norm.{i}.weight": (states // n,) for i in range(n)}
    for i in range(c["num_hidden_layers"]):
        width = 2 * hidden if i == 0 else hidden  # the first layer sees cat(embedding, hidden state)
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (heads * head, width),
            "self_attn.k_proj.weight": (kv * head, width),
            "self_attn.v_proj.weight": (kv * head, width),
            "self_attn.o_proj.weight": (hidden, heads * head),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if i == 0:
            layer["hidden_norm.weight"] = (hidden,)
        if c.get("attention_bias"):
            layer |= {f"self_attn.{p}_proj.bias": layer[f"self_attn.{p}_proj.weight"][:1] for p in "qkvo"}
        if c.get("mlp_bias"):
            layer |= {f"mlp.{p}_proj.bias": layer[f"mlp.{p}_proj.weight"][:1] for p in ("gate", "up", "down")}
        if c["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
        want |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return want


def unrepresentable(d: Drafter, layout: str) -> list[str]:
    """What of this drafter the layout cannot say, one phrase each; empty when nothing is lost."""
    c, lost = d.decoder, []
    if c.get("hidden_act", "silu") != "silu":
        lost.append(f"hidden_act {c['hidden_act']} (engines compute silu)")
    if d.target_hidden_size not in (None, c["hidden_size"]) and "embed_tokens.weight" not in d.tensors:
        lost.append("a hidden size other than the verifier's without embed_tokens of its own")
    if layout == SPECULATORS:
        if c["model_type"] not in ("llama", "qwen3"):
            lost.append(f"a decoder of type {c['model_type']} (vLLM knows llama and qwen3)")
        if d.norm_before_fc and d.fc_norm:
            lost.append("norm_before_fc together with fc_norm")
        return lost
    lost += [f"{flag} = true" for flag in NORM_FLAGS if getattr(d, flag)]
    if d.sliding:
        lost.append(f"a sliding window of {c.get('sliding_window')} tokens")
    if len(d.aux_layer_ids) != 3:
        lost.append(f"{len(d.aux_layer_ids)} auxiliary layers (its fc is fixed at 3)")
    if c["num_hidden_layers"] != 1:
        lost.append(f"{c['num_hidden_layers']} decoder layers (its further layers compute something else)")
    if c["model_type"] != "llama":
        lost.append(f"a decoder of type {c['model_type']}")
    if "embed_tokens.weight" in d.tensors:
        lost.append(
            "an embed_tokens of the drafter's own (SGLang always takes the verifier's; if it is a copy, say `--verifier`)"
        )
    lost += [f"{flag} = true" for flag in ("attention_bias", "mlp_bias") if c.get(flag)]
    return lost


# ---------------------------------------------------------------- reading


def read(folder: str | Path, layer_ids: list[int] | None = None, verifier: str | None = None) -> Drafter:
    """Read a drafter of either layout, from one safetensors file or shards with an index.

    layer_ids (vLLM's convention) fill in what the folder does not say and must agree with what it says; verifier is the public
    name to use in place of the folder's. Raises UserError.
    """
    folder = Path(folder)
    config = read_config(folder)
    layout = detect(config, folder)
    _check_kinds(config, _KINDS if layout == SPECULATORS else _KINDS | _DECODER_KINDS, "", folder)
    parse = _from_speculators if layout == SPECULATORS else _from_sglang
    d = parse(config, read_tensors(folder), folder, layer_ids, verifier)
    check_tensors(d, folder)
    return d


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: give the folder of a drafter (config.json and safetensors)") from None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} cannot be read as JSON: {e}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} does not hold a JSON object: it is not a model's configuration")
    return config


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 1 <= x < 1 << 31


def _is_texts(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(v, str) for v in x)


# kinds of values: (test, how a message calls it)
_COUNT = (_is_count, "a whole number from 1 up")
_LAYERS = (lambda x: _is_count(x) and x <= _MOST_LAYERS, f"a whole number from 1 to {_MOST_LAYERS}")
_POSITIVE = (lambda x: isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < 1e30, "a number above 0")
_FLAG = (lambda x: isinstance(x, bool), "true or false")
_TEXT = (lambda x: isinstance(x, str), "text")
_TEXTS = (_is_texts, "a list of texts")
_IDS = (lambda x: isinstance(x, list) and all(map(_is_whole, x)), "a list of whole numbers")
_ROPE_KINDS = {
    **dict.fromkeys(("rope_theta", "factor", "partial_rotary_factor"), _POSITIVE),
    **dict.fromkeys(("rope_type", "type"), _TEXT),
}
_DECODER_KINDS = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"), _COUNT),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "sliding_window"), _COUNT),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "partial_rotary_factor"), _POSITIVE),
    **dict.fromkeys(("attention_bias", "mlp_bias"), _FLAG),
    **dict.fromkeys(("model_type", "hidden_act"), _TEXT),
    "num_hidden_layers": _LAYERS,
    "layer_types": _TEXTS,
    "rope_parameters": _ROPE_KINDS,
    "rope_scaling": _ROPE_KINDS,
}
_VERIFIER_KINDS = {"name_or_path": _TEXT, "architectures": _TEXTS}
_KINDS = {
    "draft_vocab_size": _COUNT,
    "target_hidden_size": _COUNT,
    "architectures": _TEXTS,
    "speculators_model_type": _TEXT,
    **dict.fromkeys(NORM_FLAGS, _FLAG),
    "eagle_aux_hidden_state_layer_ids": _IDS,
    "speculators_config": {
        "algorithm": _TEXT,
        "verifier": _VERIFIER_KINDS,
        "proposal_methods": [{"speculative_tokens": _COUNT}],
    },
    "transformer_layer_config": _DECODER_KINDS,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": _IDS,
        "use_aux_hidden_state": _FLAG,
        **dict.fromkeys(NORM_FLAGS, _FLAG),
    },
    "eagle3dvc": {"speculative_tokens": _COUNT, "verifier": _TEXT, "verifier_architectures": _TEXTS},
}


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _check_kinds(values: Any, kinds: Any, name: str, where: Path) -> None:
    """UserError for a setting whose value is of the wrong kind; what is absent or null is left to whoever needs it."""
    if values is None:
        return
    if isinstance(kinds, tuple):
        test, called = kinds
        if not test(values):
            raise UserError(f"{where}/config.json: {name} = {json.dumps(values)[:80]} must be {called}")
    elif isinstance(kinds, list):
        if not isinstance(values, list):
            raise UserError(f"{where}/config.json: {name} must be a list")
        for i, value in enumerate(values):
            _check_kinds(value, kinds[0], f"{name}[{i}]", where)
    else:
        if not isinstance(values, dict):
            raise UserError(f"{where}/config.json: {name or 'it'} must be an object")
        for key, kind in kinds.items():
            _check_kinds(values.get(key), kind, f"{name}.{key}" if name else key, where)


def detect(config: dict[str, Any], where: Path) -> str:
    """`speculators` or `sglang`; UserError when it is neither."""
    kind = config.get("speculators_model_type")
    if kind == ALGORITHM:
        return SPECULATORS
    if kind is not None:
        raise UserError(f"{where}: speculators_model_type is {kind!r}, only eagle3 drafters are handled")
    names = config.get("architectures") or []
    if isinstance(names, list) and "LlamaForCausalLMEagle3" in names:
        return SGLANG
    raise UserError(
        f"{where}: neither a speculators EAGLE-3 drafter (no speculators_model_type) nor an EAGLE-3 drafter for SGLang "
        f"(architectures {names}, expected LlamaForCausalLMEagle3)"
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those the index names, or the only one there is."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as e:
            raise UserError(f"{index} is not a safetensors index: {e!r}") from None
        if not names or any(not isinstance(n, str) or Path(n).name != n for n in names):
            raise UserError(f"{index} names files outside its folder: refused")
        if missing := [n for n in names if not (folder / n).is_file()]:
            raise UserError(f"{index} names {missing[0]}, which does not exist: the download is incomplete")
        return [folder / n for n in names]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise UserError(
            f"{folder} holds {len(files)} safetensors files but no model.safetensors.index.json: "
            "add the index or leave one file"
        )
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"{folder / pickles[0]} is a PyTorch pickle, which can run code when loaded: "
            "convert it to safetensors where you trust it, then point here again"
        )
    raise UserError(f"{folder} holds no safetensors file: nothing to read")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Any] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as f:
                for name in f.keys():  # noqa: SIM118 (not a mapping)
                    if name in tensors:
                        raise UserError(f"{path}: tensor {name} is also in another file of this folder")
                    tensors[name] = f.get_tensor(name)
        except (SafetensorError, OSError) as e:
            raise UserError(f"{path} cannot be read, it is truncated or damaged ({e}): export or download it again") from None
    return tensors


def _file_name(name: str, layout: str) -> str:
    """How a layout's file calls the tensor that speculators calls `name`."""
    return re.sub(r"^layers\.0\.", "midlayer.", name) if layout == SGLANG else name


def _common_names(tensors: dict[str, torch.Tensor], where: Path) -> dict[str, torch.Tensor]:
    """SGLang's tensors by speculators' names, however they are spelt; UserError where two names mean one tensor."""
    found: dict[str, str] = {}
    for given in tensors:
        name = _common_name(given)
        if name in found:
            raise UserError(f"{where}: {found[name]} and {given} are two tensors of one meaning: remove the wrong one")
        found[name] = given
    return {name: tensors[given] for name, given in found.items()}


def _common_name(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", re.sub(r"^model\.", "", name))


def check_names(folder: Path, layout: str) -> None:
    """UserError for a tensor whose name the layout's engine would not find, though `read` knows what is meant.

    SGLang takes a name as it is or with `model.` in front and skips what it does not find without a word (source: sglang
    llama_eagle3.py); vLLM refuses to load what it does not find.
    """
    for given in _tensor_names(folder):
        if layout == SPECULATORS:
            if given in _SKIPPED:
                raise UserError(f"{folder}: {given} is a tensor of the verifier, with which vLLM does not load: leave it out")
            continue
        name = _common_name(given)
        written = _file_name(name, layout)
        if given != written and (name in _BARE or given != f"model.{written}"):
            raise UserError(
                f"{folder}: SGLang does not know tensor {given} and would skip it without a word: it must be called {written}"
            )


def _tensor_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    names: list[str] = []
    for path in weight_files(folder):
        with safe_open(path, "pt") as f:
            names += f.keys()
    return names


def check_tensors(d: Drafter, where: Path) -> None:
    """Names, shapes and kinds against what vLLM's loader asks for; raises UserError naming the first difference."""
    want = expected_tensors(d)
    have = {name: tuple(t.shape) for name, t in d.tensors.items()}
    if d.pruned and "lm_head.weight" not in have:
        raise UserError(
            f"{where}: lm_head.weight is missing; with a pruned draft vocabulary ({d.draft_vocab_size} of {d.vocab_size}) "
            "engines would take the verifier's head instead and silently accept almost nothing"
        )
    if d.pruned and "d2t" not in have:
        raise UserError(
            f"{where}: d2t is missing; the draft vocabulary has {d.draft_vocab_size} of {d.vocab_size} tokens, "
            "without the map every draft token means another one"
        )
    missing = sorted(want.keys() - have.keys() - {"t2d"})
    if missing:
        raise UserError(f"{where}: tensor {missing[0]} is missing ({len(missing)} missing in all)")
    own = {"embed_tokens.weight": (d.vocab_size, d.decoder["hidden_size"])}
    if unknown := sorted(have.keys() - want.keys() - own.keys()):
        raise UserError(
            f"{where}: tensor {unknown[0]} has no place in this configuration; engines would skip it silently "
            "(are the norm flags, biases or the draft vocabulary in config.json right?)"
        )
    for name, shape in sorted((want | own).items()):
        if name in have and have[name] != shape:
            raise UserError(f"{where}: {name} has shape {list(have[name])}, this configuration needs {list(shape)}")
    for name, t in sorted(d.tensors.items()):
        kind = {"d2t": "torch.int64", "t2d": "torch.bool"}.get(name)
        if kind and str(t.dtype) != kind:
            raise UserError(f"{where}: {name} is {t.dtype}, it must be {kind}")
        if kind is None and str(t.dtype).removeprefix("torch.") not in DTYPES:
            raise UserError(f"{where}: {name} is {t.dtype}, not one of {', '.join(DTYPES)}; quantised drafters are not handled")
        if kind is None and not t.isfinite().all():
            raise UserError(f"{where}: {name} holds values that are not finite")
    _check_vocabulary(d, where)


def _check_vocabulary(d: Drafter, where: Path) -> None:
    import torch

    if not d.pruned:
        return
    ids = d.tensors["d2t"] + torch.arange(d.draft_vocab_size)
    if ids.min() < 0 or ids.max() >= d.vocab_size:
        raise UserError(f"{where}: d2t points outside the verifier's vocabulary of {d.vocab_size} tokens")
    if ids.unique().numel() != ids.numel():
        raise UserError(f"{where}: d2t maps two draft tokens to the same verifier token: it is not a vocabulary map")
    if (t2d := d.tensors.get("t2d")) is not None and not torch.equal(ids.sort().values, t2d.nonzero()[:, 0]):
        raise UserError(f"{where}: d2t and t2d disagree on which verifier tokens can be drafted")


def check_config(config: dict[str, Any], d: Drafter, layout: str, where: Path) -> None:
    """Keys that change nothing here but that engines obey; raises UserError naming the first that would mislead one."""

    def refuse(why: str) -> None:
        raise UserError(f"{where}/config.json: {why}")

    decoder = config.get("transformer_layer_config") if layout == SPECULATORS else config
    dtype = str(d.tensors["fc.weight"].dtype).removeprefix("torch.")
    for block in (config, decoder):
        for key in ("_name_or_path", "name_or_path"):
            if block.get(key) and looks_local(str(block[key])):
                refuse(f"{key} is {block[key]!r}, a local path")
        if block.get("auto_map"):
            refuse("auto_map asks engines to run code of the folder, which a drafter has none of")
        for key in ("dtype", "torch_dtype"):
            if block.get(key) not in (None, *DTYPES):
                refuse(f"{key} is {block[key]!r}, no dtype that engines compute a drafter in")
            if block.get(key) not in (None, dtype):
                refuse(f"{key} is {block[key]!r} but the tensors are {dtype}: engines would compute in the one that is said")
        if block.get("logit_scale", 1) not in (None, 1):
            refuse(f"logit_scale is {block['logit_scale']}: vLLM multiplies the logits by it, this drafter has no such factor")
        if block.get("quantization_config"):
            refuse("quantization_config is set: quantised drafters are not handled")
        if block.get("bias"):
            refuse("bias is set: engines would make biases that no tensor fills")
        if block.get("tie_word_embeddings"):
            refuse("tie_word_embeddings is true: an engine may take the embedding for the head, which has its own tensor")
    if layout == SGLANG:
        if config.get("rope_theta") is None:
            refuse("rope_theta is missing at top level: SGLang would assume 10000")
        if d.decoder["rope_parameters"]["rope_type"] != "default" and not config.get("rope_scaling"):
            refuse("rope_scaling is missing: SGLang would not scale what rope_parameters scales")
        if not config.get("draft_vocab_size"):
            refuse("draft_vocab_size is missing: SGLang would take the verifier's head")
        return
    if not decoder.get("num_hidden_layers"):
        refuse("num_hidden_layers is missing from the decoder's configuration: vLLM does not load without it")
    aux = decoder.get("num_aux_hidden_states", config.get("num_aux_hidden_states"))
    if (3 if aux is None else aux) != len(d.aux_layer_ids):
        refuse(
            f"num_aux_hidden_states is {'missing' if aux is None else aux}, with {len(d.aux_layer_ids)} auxiliary layers: vLLM sizes "
            "fc by it (3 where it is missing)"
        )
    spec = config.get("speculators_config")
    if spec.get("algorithm") != ALGORITHM:
        refuse(f"speculators_config.algorithm is {spec.get('algorithm')!r}, not {ALGORITHM}")
    methods = spec.get("proposal_methods")
    tokens = (
        [m.get("speculative_tokens") if isinstance(m, dict) else None for m in methods] if isinstance(methods, list) else []
    )
    if not tokens or any(type(n) is not int or not 1 <= n <= MOST_DRAFT_TOKENS for n in tokens):
        refuse(
            f"speculators_config.proposal_methods must be a list whose entries say speculative_tokens, 1 to {MOST_DRAFT_TOKENS}"
        )


def _decoder(raw: dict[str, Any], where: Path, drop: set[str] = frozenset()) -> dict[str, Any]:
    """Decoder keys in one spelling, defaults written out: head_dim, key/value heads, rope_parameters."""
    c = {k: v for k, v in raw.items() if k not in _NOISE | drop and not k.startswith("_")}
    for key in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "rms_norm_eps"):
        if c.get(key) is None:
            raise UserError(f"{where}/config.json: {key} is missing from the decoder's configuration")
    c["model_type"] = c.get("model_type") or "llama"
    c["num_hidden_layers"] = c.get("num_hidden_layers") or 1
    c["num_key_value_heads"] = c.get("num_key_value_heads") or c["num_attention_heads"]
    c["head_dim"] = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    if c["num_attention_heads"] % c["num_key_value_heads"] or c["head_dim"] % 2:
        raise UserError(
            f"{where}/config.json: {c['num_attention_heads']} attention heads of {c['num_key_value_heads']} keys and "
            f"{c['head_dim']} channels: the first must be a multiple of the second, the last even"
        )
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
        c.pop(key, None)
    c["rope_parameters"] = _rope(raw, where)
    types = c.get("layer_types")
    if types:
        _check_layer_types(types, c, where)
    if not types or set(types) == {"full_attention"}:  # the same as not saying it
        for key in ("layer_types", "sliding_window", "max_window_layers", "use_sliding_window"):
            c.pop(key, None)
    return c


def _rope(raw: dict[str, Any], where: Path) -> dict[str, Any]:
    """Rope settings in `rope_parameters`' spelling; UserError where two places or spellings contradict, as each engine reads its own."""
    rope: dict[str, Any] = {}
    blocks = {
        "rope_parameters": raw.get("rope_parameters") or {},
        "rope_scaling": raw.get("rope_scaling") or {},
        "the decoder": {k: raw[k] for k in ("rope_theta", "partial_rotary_factor") if raw.get(k) is not None},
    }
    for place, block in blocks.items():
        for key, value in block.items():
            if isinstance(value, dict):
                raise UserError(f"{where}/config.json: {place} has an entry {key}; rope settings a layer type are not handled")
            name = "rope_type" if key == "type" else key
            if rope.get(name) is None:
                rope[name] = value
            elif value not in (None, rope[name]):
                raise UserError(
                    f"{where}/config.json: {key} is {value} in {place} but {rope[name]} in another place: engines differ in which "
                    "they take, leave the right one"
                )
    if blocks["rope_parameters"] and blocks["rope_scaling"]:
        a, b = ({("rope_type" if k == "type" else k) for k in blocks[n]} for n in ("rope_parameters", "rope_scaling"))
        if one := sorted((a ^ b) - {"rope_theta"}):
            raise UserError(
                f"{where}/config.json: {one[0]} stands in only one of rope_parameters and rope_scaling: leave rope_scaling out"
            )
    if rope.pop("partial_rotary_factor", 1) not in (None, 1):
        raise UserError(f"{where}/config.json: a partial_rotary_factor other than 1 is not handled: the whole head must rotate")
    if not rope.get("rope_type"):
        rope["rope_type"] = "default"
    if rope.get("rope_theta") is None:
        raise UserError(f"{where}/config.json: no rope_theta; engines would assume 10000, say which it is")
    return rope


def _check_layer_types(types: list[str], c: dict[str, Any], where: Path) -> None:
    if len(types) != c["num_hidden_layers"]:
        raise UserError(
            f"{where}/config.json: layer_types has {len(types)} entries for {c['num_hidden_layers']} layers: one a layer is needed"
        )
    if other := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise UserError(
            f"{where}/config.json: layer_types names {other[0]!r}; full_attention and sliding_attention are what is handled"
        )
    if "sliding_attention" in types and not c.get("sliding_window"):
        raise UserError(f"{where}/config.json: layer_types names sliding_attention but sliding_window is missing")


def _settle(found: Any, given: Any, what: str, option: str, where: Path) -> Any:
    """The value found in the folder or given by the caller; both must agree, one must be there."""
    if found and given and list(found) != list(given):
        raise UserError(f"{where} says {what} {found}, you gave {given}: leave {option} out or correct it")
    if not found and not given:
        raise UserError(f"{where} does not say its {what}: give {option}")
    return found or given


def _check_ids(ids: list[int], where: Path) -> tuple[int, ...]:
    ok = isinstance(ids, list | tuple) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not ok or list(ids) != sorted(set(ids)) or ids[0] < 1:
        raise UserError(
            f"{where}: auxiliary layer ids {ids} (vLLM's convention) must be strictly ascending from 1 up; "
            "engines return the states in ascending order whatever the order asked"
        )
    return tuple(ids)


def _from_speculators(config, tensors, where: Path, layer_ids, verifier) -> Drafter:
    raw = config.get("transformer_layer_config")
    spec = config.get("speculators_config")
    if not isinstance(raw, dict) or not isinstance(spec, dict):
        raise UserError(f"{where}/config.json: transformer_layer_config and speculators_config must both be objects")
    if raw.get("eagle_config"):
        raise UserError(
            f"{where}/config.json: eagle_config inside transformer_layer_config: vLLM obeys it before this layout's keys, leave it out"
        )
    ids = _settle(config.get("eagle_aux_hidden_state_layer_ids"), layer_ids, "layer ids", "--layer-ids", where)
    source = spec.get("verifier") or {}
    methods = spec.get("proposal_methods") or [{}]
    decoder = _decoder(raw, where)
    if config.get("norm_before_residual") is None:
        raise UserError(f"{where}/config.json: norm_before_residual is missing; vLLM would assume true, say which it is")
    return Drafter(
        tensors={k: v for k, v in tensors.items() if k not in _SKIPPED},
        decoder=decoder,
        aux_layer_ids=_check_ids(ids, where),
        draft_vocab_size=config.get("draft_vocab_size") or decoder["vocab_size"],
        verifier=verifier or source.get("name_or_path") or "",
        verifier_architectures=tuple(source.get("architectures") or ()),
        speculative_tokens=(methods[0] or {}).get("speculative_tokens") or 3,
        target_hidden_size=config.get("target_hidden_size"),
        **{flag: bool(config.get(flag)) for flag in NORM_FLAGS},
    )


def _from_sglang(config, tensors, where: Path, layer_ids, verifier) -> Drafter:
    eagle = config.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise UserError(f"{where}/config.json: use_aux_hidden_state is false, which is not an EAGLE-3 drafter")
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    ids = _settle(ids and [i + 1 for i in ids], layer_ids, "layer ids", "--layer-ids (vLLM's: SGLang's plus one)", where)
    if said := [flag for flag in NORM_FLAGS if config.get(flag) or eagle.get(flag)]:
        raise UserError(
            f"{where}/config.json: {said[0]} = true: SGLang's layout cannot say this and SGLang computes without it. If the "
            "drafter was trained so, only vLLM can serve it, from a speculators config.json; if not, remove the key"
        )
    extra = config.get("eagle3dvc") or {}
    decoder = _decoder(config, where, drop=_SGLANG_OWN.union(NORM_FLAGS) - {"rope_theta", "rope_scaling"})
    name = verifier or extra.get("verifier")
    if not name:
        raise UserError(f"{where} does not name its verifier: give --verifier-name, the public id of the model")
    return Drafter(
        tensors=_common_names(tensors, where),
        decoder=decoder,
        aux_layer_ids=_check_ids(ids, where),
        draft_vocab_size=config.get("draft_vocab_size") or decoder["vocab_size"],
        verifier=name,
        verifier_architectures=tuple(extra.get("verifier_architectures") or ()),
        speculative_tokens=extra.get("speculative_tokens") or 3,
        target_hidden_size=config.get("target_hidden_size"),
    )


# ---------------------------------------------------------------- writing


def looks_local(name: str) -> bool:
    """Whether a model's name is a path of some machine rather than a public id."""
    return (
        not name
        or name.startswith(("/", ".", "~", "\\"))
        or re.match(r"^[A-Za-z]:[\\/]", name) is not None
        or (name.count("/") > 1 or "\\" in name)
    )


def check_verifier_name(name: str, where: str) -> None:
    """UserError for a verifier's name that means nothing elsewhere; `where` begins the message."""
    fault = ""
    if looks_local(name):
        fault = "is a local path, which means nothing elsewhere"
    elif not name.isprintable():  # control characters, line ends, half of a surrogate pair
        fault = "holds characters that cannot be printed"
    if fault:
        raise UserError(
            f"{where}the verifier's name {name!r} {fault}: give its public id (verifier.name in params.yaml, "
            "--verifier-name of convert, in a finished folder its config.json)"
        )


def config_of(d: Drafter, layout: str) -> dict[str, Any]:
    """The `config.json` of the layout."""
    dtype = str(d.tensors["fc.weight"].dtype).removeprefix("torch.")
    if layout == SPECULATORS:
        decoder = {**d.decoder, "tie_word_embeddings": False, "use_cache": True}
        if len(d.aux_layer_ids) != 3:
            decoder["num_aux_hidden_states"] = len(d.aux_layer_ids)  # vLLM sizes fc by it
        return {
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": d.draft_vocab_size,
            "dtype": dtype,
            "eagle_aux_hidden_state_layer_ids": list(d.aux_layer_ids),
            "embed_requires_grad": False,
            **{flag: getattr(d, flag) for flag in NORM_FLAGS},
            "speculators_config": {
                "algorithm": ALGORITHM,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "accept_tolerance": 0.0,
                        "proposal_type": "greedy",
                        "speculative_tokens": d.speculative_tokens,
                        "verifier_accept_k": 1,
                    }
                ],
                "verifier": {"architectures": list(d.verifier_architectures), "name_or_path": d.verifier},
            },
            "speculators_model_type": ALGORITHM,
            "speculators_version": SPECULATORS_VERSION,
            "target_hidden_size": d.target_hidden_size,
            "tie_word_embeddings": False,
            "transformer_layer_config": decoder,
        }
    rope = dict(d.decoder["rope_parameters"])
    theta = rope.pop("rope_theta")
    return {
        **{k: v for k, v in d.decoder.items() if k != "rope_parameters"},
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": d.draft_vocab_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in d.aux_layer_ids],
            "use_aux_hidden_state": True,
        },
        "eagle3dvc": {  # not read by SGLang: what the way back to speculators needs
            "speculative_tokens": d.speculative_tokens,
            "verifier": d.verifier,
            "verifier_architectures": list(d.verifier_architectures),
        },
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        "rope_theta": theta,
        **({} if d.target_hidden_size is None else {"target_hidden_size": d.target_hidden_size}),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def write(d: Drafter, folder: str | Path, layout: str) -> None:
    """Write `config.json` and `model.safetensors`; UserError for what the layout cannot represent, a local path or a full disk."""
    from eagle3dvc.stage import write_json

    folder = Path(folder)
    if lost := unrepresentable(d, layout):
        raise UserError(
            f"the {layout} layout cannot represent {'; '.join(lost)}. Only a drafter trained without can have it (here: "
            f"train.norms = portable and the defaults for the rest); to export this one leave {layout} out of export.layouts"
        )
    check_verifier_name(d.verifier, "")
    check_tensors(d, folder)
    folder.mkdir(parents=True, exist_ok=True)
    # one metadata key: with several, safetensors' order differs between processes and so do the file's bytes
    tensors = {_file_name(k, layout): v.contiguous() for k, v in d.tensors.items()}
    save_tensors(tensors, folder / WEIGHTS, {"format": "pt"})
    try:
        write_json(folder / "config.json", config_of(d, layout))
    except OSError as e:
        raise UserError(f"config.json cannot be written ({e.strerror})") from None
    except UnicodeEncodeError:
        raise UserError("config.json cannot be written: a text of the drafter's configuration is not valid Unicode") from None


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file that everyone may read; UserError where the disk does not take it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
        path.chmod(0o644)  # safetensors writes files that only their owner may read
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path.name} cannot be written ({e}): is the disk full?") from None

"""Building and loading the drafter: speculators' `Eagle3DraftModel` with every setting explicit.

Nothing is looked up by the verifier's name: the config and the head weights come from data/verifier, so neither a network nor
the verifier's remote code is needed, and a missing tensor is an error (speculators fills in ones, or the embedding).
"""

from __future__ import annotations

import difflib
import functools
from pathlib import Path
from typing import Any

import torch

from eagle3dvc.drafter import layouts
from eagle3dvc.drafter.vocab import DraftVocab, check
from eagle3dvc.errors import UserError
from eagle3dvc.stage import write_json

# vLLM and SGLang both represent a drafter without the three extra norms (SGLang drops their tensors without a word); the other
# preset is what `speculators train` uses when nothing is said.
NORMS = {
    "portable": {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False},
    "speculators": {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": False, "norm_output": True},
}
# what makes two checkpoints compute different things from the same tensors
SAME_FUNCTION = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids")
SAME_LAYER = ("rope_parameters", "rms_norm_eps", "head_dim", "num_attention_heads", "num_key_value_heads", "hidden_act")


def _rope(config: Any) -> dict[str, Any]:
    """The verifier's rope parameters for a drafter whose whole head rotates (no partial, no multimodal sections)."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" not in rope and "full_attention" in rope:  # one entry a layer type: the drafter attends fully
        rope = dict(rope["full_attention"])
    for key in ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "type"):
        rope.pop(key, None)
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", 10000.0)
    return rope


def _heads(config: Any) -> dict[str, int]:
    """Attention shape: the verifier's, or for MLA verifiers (whose head_dim is only the rope part) 128-wide heads, 8 of keys."""
    hidden = config.hidden_size
    if getattr(config, "kv_lora_rank", None):
        heads = max(1, hidden // 128)
        groups = max(k for k in range(1, min(8, heads) + 1) if heads % k == 0)
        return {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": 128 if hidden >= 128 else hidden}
    heads = config.num_attention_heads
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
    }


def layer_config(verifier: str | Path, train: Any, *, norm_eps: float, aux_layers: int):
    """The transformers config of the draft layers, from data/verifier/config.json and params.train.

    norm_eps: the verifier's; it is also the epsilon of the frozen target norm. aux_layers: number of auxiliary hidden states.
    Raises UserError where train.draft_config names something that is no setting, or the shape is impossible.
    """
    from transformers import AutoConfig, LlamaConfig
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    source = AutoConfig.from_pretrained(str(verifier))
    source = source.get_text_config() if hasattr(source, "get_text_config") else source
    settings: dict[str, Any] = {
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": getattr(source, "intermediate_size", None) or 3 * source.hidden_size,
        "num_hidden_layers": train.draft_layers,
        **_heads(source),
        "hidden_act": "silu",  # the only activation vLLM's and SGLang's draft layers have
        "max_position_embeddings": source.max_position_embeddings,
        "initializer_range": getattr(source, "initializer_range", 0.02),
        "rms_norm_eps": norm_eps,
        "rope_parameters": _rope(source),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    chosen = {
        "num_attention_heads": train.draft_heads,
        "num_key_value_heads": train.draft_kv_heads,
        "head_dim": train.draft_head_dim,
        "intermediate_size": train.draft_intermediate_size,
    }
    settings |= {k: v for k, v in chosen.items() if v is not None}
    overrides = dict(train.draft_config)
    model_type = overrides.pop("model_type", "llama")
    if model_type not in ("llama", "qwen3"):
        raise UserError(
            f"train.draft_config.model_type = {model_type!r} must be llama or qwen3: vLLM loads no other draft layer"
        )
    for key in overrides:
        if key not in settings:
            near = difflib.get_close_matches(key, settings, n=1)
            hint = f"did you mean {near[0]}?" if near else f"valid keys: {', '.join(settings)}"
            raise UserError(f"train.draft_config.{key} is not a setting of a draft layer; {hint}")
    settings |= overrides
    for key in ("vocab_size", "hidden_size"):
        if settings[key] != getattr(source, key):
            raise UserError(
                f"train.draft_config.{key} = {settings[key]} must equal the verifier's {getattr(source, key)}: the drafter shares "
                "its embedding and is trained on its states"
            )
    if settings["rms_norm_eps"] != norm_eps:
        raise UserError(
            f"train.draft_config.rms_norm_eps must stay the verifier's {norm_eps}: it is also that of the target norm"
        )
    if settings["num_attention_heads"] % settings["num_key_value_heads"]:
        raise UserError(
            f"the drafter's {settings['num_attention_heads']} attention heads are not a multiple of its "
            f"{settings['num_key_value_heads']} key heads: set train.draft_heads and train.draft_kv_heads"
        )
    if settings["head_dim"] % 2:
        raise UserError(
            f"the drafter's head dimension {settings['head_dim']} is odd: set train.draft_head_dim to an even number"
        )
    # speculators' own default is a 2048-token window, which loses a third of the acceptance on long prompts
    kind = "sliding_attention" if train.sliding_window else "full_attention"
    settings["layer_types"] = [kind] * settings["num_hidden_layers"]
    if train.sliding_window:
        settings |= {"sliding_window": train.sliding_window, "use_sliding_window": True}
    if aux_layers != 3:
        settings["num_aux_hidden_states"] = aux_layers  # vLLM sizes fc by this and assumes 3 where it is absent
    return (Qwen3Config if model_type == "qwen3" else LlamaConfig)(**settings)


def draft_config(info: Any, train: Any, layer_ids: list[int]):
    """The whole speculator config. info: VerifierInfo; layer_ids: auxiliary ids and, last, the verifier's layer count."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    aux = list(layer_ids[:-1])
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(info.folder, train, norm_eps=info.norm_eps, aux_layers=len(aux)),
        draft_vocab_size=train.draft_vocab_size,
        **NORMS[train.norms],
        embed_requires_grad=False,
        eagle_aux_hidden_state_layer_ids=aux,
        speculators_config=SpeculatorsConfig(
            algorithm=layouts.ALGORITHM,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=train.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=info.name, architectures=[]),
        ),
    )


def instantiate(config: Any, head: Any, vocab: DraftVocab, attention: str):
    """A fresh drafter in float32 with the verifier's embedding, norm and head rows in place. attention: eager, sdpa or
    simple_flex_attention. Raises UserError where the frozen targets would not be the verifier's own logits."""
    from speculators.models.eagle3 import Eagle3DraftModel

    config.transformer_layer_config._attn_implementation = attention
    model = Eagle3DraftModel(config).float()
    rows = head.lm_head[vocab.t2d].float()
    with torch.no_grad():
        if model.use_draft_vocab:
            model.load_vocab_mappings(vocab.t2d, vocab.d2t)
        model.embed_tokens.weight.copy_(head.embed)
        model.lm_head.weight.copy_(rows)
        model.verifier_lm_head.weight.copy_(rows)
        model.verifier_norm.weight.copy_(head.norm)
    for frozen in (model.embed_tokens, model.verifier_lm_head, model.verifier_norm):
        frozen.weight.requires_grad_(False)
    _check_targets(model, head, vocab)
    return model


def checkpoint_gradients(model: Any) -> None:
    """Have the backward pass compute the feed-forward blocks again instead of keeping their activations, the widest there are.

    The attention is left alone: the TTT steps share one key-value cache, which a second pass would fill twice.
    """
    from torch.utils.checkpoint import checkpoint

    for layer in model.layers:
        layer.mlp.forward = functools.partial(checkpoint, layer.mlp.forward, use_reentrant=False)


def _check_targets(model: Any, head: Any, vocab: DraftVocab) -> None:
    """speculators computes targets with a plain RMSNorm and a linear head; some verifiers (Gemma's 1 + w norm, capped logits) do
    not, and would silently be trained on wrong targets."""
    x = torch.randn(4, head.norm.shape[0], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = model.verifier_lm_head(model.verifier_norm(x)), head.logits(x)[:, vocab.t2d]
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max())):
        raise UserError(
            "the verifier's final norm or head is not a plain RMSNorm and a linear layer (scaled norm or capped logits?): "
            "speculators' EAGLE-3 model would be trained on wrong targets; this verifier is not supported"
        )


def read_checkpoint(folder: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config.json, tensors) of a checkpoint folder, single-file or sharded; raises UserError where it is incomplete or damaged."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a drafter checkpoint: it has no config.json")
    return layouts.read_config(folder), layouts.read_tensors(folder)


def vocab_of(tensors: dict[str, torch.Tensor], config: dict[str, Any], folder: str | Path) -> DraftVocab:
    """The vocabulary map inside a checkpoint; the identity where it has the whole vocabulary. Raises UserError."""
    vocabulary, draft = config["transformer_layer_config"]["vocab_size"], config["draft_vocab_size"]
    if draft == vocabulary:
        return DraftVocab(torch.zeros(draft, dtype=torch.long), torch.ones(vocabulary, dtype=torch.bool))
    if "d2t" not in tensors:
        raise UserError(f"{folder} has a pruned vocabulary ({draft} of {vocabulary}) but no d2t: its draft ids mean nothing")
    ids = torch.arange(draft) + tensors["d2t"].long()
    t2d = tensors.get("t2d")
    if t2d is None and int(ids.min()) >= 0 and int(ids.max()) < vocabulary:
        t2d = torch.zeros(vocabulary, dtype=torch.bool)
        t2d[ids] = True
    return check(tensors["d2t"], torch.zeros(vocabulary, dtype=torch.bool) if t2d is None else t2d, str(folder))


def put_weights(model: Any, tensors: dict[str, torch.Tensor], where: str | Path) -> None:
    """Copy a checkpoint's tensors into the model in float32; raises UserError for a missing, extra or misshapen one."""
    own = model.state_dict()
    wanted = {k for k in own if not k.startswith(("verifier_", "embed_tokens.")) and k not in ("d2t", "t2d")}
    given = {k: v for k, v in tensors.items() if not k.startswith(("verifier_", "embed_tokens.")) and k not in ("d2t", "t2d")}
    for problem, keys in (("lacks", wanted - given.keys()), ("has unexpected", given.keys() - wanted)):
        if keys:
            raise UserError(f"{where} {problem} {', '.join(sorted(keys)[:4])}: it is of another architecture or damaged")
    for k in sorted(wanted):
        if own[k].shape != given[k].shape:
            raise UserError(
                f"{where}: {k} has shape {list(given[k].shape)}, the drafter's is {list(own[k].shape)}: the checkpoint is of "
                "another architecture, set the train.draft_* parameters to its shape"
            )
        if not torch.isfinite(given[k]).all():
            raise UserError(f"{where}: {k} holds values that are not finite: the checkpoint is damaged")
        own[k].copy_(given[k].float())


def own_embedding(tensors: dict[str, torch.Tensor], embed: torch.Tensor) -> torch.Tensor | None:
    """The checkpoint's embedding where it is not the verifier's `embed` [vocabulary, hidden] (in the checkpoint's precision)."""
    given = tensors.get("embed_tokens.weight")
    return given if given is not None and not torch.equal(given.float(), embed.to(given.dtype).float()) else None


def load(folder: str | Path, verifier_folder: str | Path = "data/verifier", attention: str = "sdpa"):
    """A trained drafter (speculators layout) in float32 and eval mode, with the verifier's head from verifier_folder, and its
    embedding where the checkpoint has none of its own.

    Raises UserError where the checkpoint is incomplete, damaged or of another verifier.
    """
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    from eagle3dvc.verifier import load_head

    raw, tensors = read_checkpoint(folder)
    if raw.get("speculators_model_type") != layouts.ALGORITHM:
        raise UserError(f"{folder}/config.json is not an EAGLE-3 checkpoint in speculators layout: convert it first")
    head = load_head(verifier_folder)
    layer = raw["transformer_layer_config"]
    if (layer["vocab_size"], layer["hidden_size"]) != tuple(head.lm_head.shape):
        raise UserError(
            f"{folder} is a drafter for a verifier with vocabulary {layer['vocab_size']} and hidden size {layer['hidden_size']}, "
            f"{verifier_folder} has {head.lm_head.shape[0]} and {head.lm_head.shape[1]}"
        )
    draft_vocab = vocab_of(tensors, raw, folder)
    try:
        model = instantiate(Eagle3SpeculatorConfig.from_pretrained(str(folder)), head, draft_vocab, attention)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        said = " ".join(str(e).split())[:200]
        raise UserError(f"{folder}/config.json is no configuration of a drafter ({type(e).__name__}: {said})") from None
    with torch.no_grad():
        put_weights(model, tensors, folder)
        if (embed := own_embedding(tensors, head.embed)) is not None:
            model.embed_tokens.weight.copy_(embed)
    return model.eval()


def save(model: Any, folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Write config.json and model.safetensors (speculators layout, float32). The embedding is left out: it is the verifier's.

    tensors: values to write in place of the model's own. The same model always gives the same bytes.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    state = model.state_dict() | (tensors or {})
    kept = {k: v.detach().cpu().contiguous() for k, v in state.items() if not k.startswith(("verifier_", "embed_tokens."))}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    # not save_pretrained: it puts a copy of speculators' own source beside the config and a map to it inside
    config = {k: v for k, v in model.config.to_dict().items() if k != "auto_map" and not k.startswith("_")} | {
        "dtype": "float32"
    }
    write_json(folder / "config.json", config)

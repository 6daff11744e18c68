"""Proof that an export means what was trained: `self_check` in the stage, `verify_export` for anyone who has the folder.

Three layers, cheapest first, each with its own reason when it refuses:
1. structure (`layouts.read`): files whole, names, shapes and dtypes as vLLM's loader asks for, vocabulary map sound,
   weights finite, no local path;
2. provenance (`eagle3dvc.json` in the layout): layer ids, rope, norms and a checksum a tensor, as they were exported;
3. arithmetic: a few held-out states, the tokens after them and the logits they must give (`eagle3dvc.probe`), computed
   again by `reference`. This needs neither the cache nor the verifier. With the cache (`hidden`) and the verifier's
   folder the drafts are also compared with what the verifier says next.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3dvc.drafter import guards, layouts
from eagle3dvc.drafter.layouts import Drafter
from eagle3dvc.errors import UserError

if TYPE_CHECKING:
    import torch

    from eagle3dvc.drafter.reference import Reference

PROVENANCE = "eagle3dvc.json"
PROBE = "eagle3dvc.probe"  # safetensors inside, but not in name: engines load every *.safetensors of a folder
STEPS = 3  # drafting steps checked
POSITIONS = 48  # positions of the probe
TOP = 8  # logits kept a position
JUDGED = 2048  # positions on which the first drafts are compared with the verifier's next words
TOLERANCE = 1e-3  # of the largest logit: float32 against float64 gives some 1e-6, any wrong setting far more


@dataclass(frozen=True)
class Window:
    """A stretch of one sample: states [T, A, H] of its first T positions and the tokens fed, [STEPS][T]."""

    states: torch.Tensor
    tokens: torch.Tensor  # int64 [T + STEPS - 1], the text from x_1 on

    def fed(self, step: int) -> torch.Tensor:
        return self.tokens[step : step + len(self.states)]


def samples_of(data: Any, positions: int) -> Iterator[tuple[Window, Any]]:
    """(the first `positions` of it, sample) of every sample long enough, held-out ones first."""
    for i in itertools.chain(data.splits.get("heldout", ()), data.splits.get("train", ())):
        item = data[int(i)]
        if (length := min(positions, len(item.token_ids) - STEPS)) > 0:
            yield window(item, length), item


def windows(hidden: str | Path, prompts: str | Path, count: int = 4, positions: int = 192) -> list[Window]:
    """The starts of up to `count` held-out samples (training samples where there is no held-out split). Raises UserError."""
    from eagle3dvc.hidden_states.reader import HiddenStates

    found = [w for w, _ in itertools.islice(samples_of(HiddenStates(hidden, prompts), positions), count)]
    if not found:
        raise UserError(f"{hidden} holds no sample longer than {STEPS} tokens: nothing to check the export with")
    return found


def window(item: Any, length: int) -> Window:
    """The first `length` positions of a sample of the reader."""
    import torch

    tokens = torch.as_tensor(item.token_ids).long()[1 : length + STEPS]
    return Window(item.hidden_states[:length, :-1], tokens)


# ---------------------------------------------------------------- the stage's own check


def trained_logits(model, w: Window) -> list[torch.Tensor]:
    """Logits [T, draft vocabulary] of each step from speculators' own forward, the text fed (teacher forced)."""
    import torch

    caught: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: caught.append(output[0].detach().clone()))
    extra = len(w.tokens) - len(w.states)  # so that every checked position has its true tokens in every step
    states = w.states.flatten(1)
    states = torch.cat([states, states[-1:].expand(extra, -1)]) if extra else states
    try:
        with torch.no_grad(), guards.uncompiled():
            model(
                hidden_states=states[None].to(model.fc.weight.dtype),
                input_ids=w.tokens[None],
                document_ids=torch.zeros(1, len(w.tokens), dtype=torch.long),
                position_ids=1 + torch.arange(len(w.tokens))[None],
                ttt_steps=STEPS,
            )
    finally:
        hook.remove()
    return [logits[: len(w.states)] for logits in caught]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference as a fraction of the largest expected logit; inf when something is not finite."""
    worst = ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-12)).item()
    return worst if worst == worst else float("inf")


@dataclass(frozen=True)
class Wanted:
    """What a layout must compute on one window: logits [T, draft vocabulary] a step, of the model rounded to the export's dtype
    and as trained, with the embeddings fed."""

    window: Window
    embeds: list[torch.Tensor]
    rounded: list[torch.Tensor]
    trained: list[torch.Tensor]


@contextlib.contextmanager
def _rounded(model, dtype: torch.dtype) -> Iterator[None]:
    """The drafter's own weights rounded to dtype for a while, in place: a copy of a large drafter may not fit.

    Neither the verifier's tensors nor buffers: rope frequencies stay float32 in every engine.
    """
    kept = {n: p.data for n, p in model.named_parameters() if not n.startswith(("verifier_", "embed_tokens."))}
    own = dict(model.named_parameters())
    try:
        for name, data in kept.items():
            own[name].data = data.to(dtype).to(data.dtype)
        yield
    finally:
        for name, data in kept.items():
            own[name].data = data


def wanted(model, dtype: torch.dtype, probes: list[Window]) -> list[Wanted]:
    """Logits of the trained model (speculators' code, float32) that every layout in this dtype is compared with."""
    with _rounded(model, dtype):
        rounded = [trained_logits(model, w) for w in probes]
    return [
        Wanted(w, [model.embed_tokens.weight.detach()[w.fed(j)] for j in range(STEPS)], tight, trained_logits(model, w))
        for w, tight in zip(probes, rounded, strict=True)
    ]


def self_check(folder: Path, model, expected: list[Wanted]) -> dict[str, float]:
    """Reload one layout and compare it with the trained model on held-out states; raises UserError when it is another one.

    The comparison is with the model rounded to the export's dtype, so it is tight. Returns `max_difference` of those logits and
    what rounding itself changes, `same_token`: share of greedy drafts equal to those of the model as trained.
    """
    import torch

    layouts.read(folder)
    layouts.check_names(folder, layouts.detect(layouts.read_config(folder), folder))
    ref = _reference(folder)
    if ref.aux_layer_ids != (trained_on := list(model.config.eagle_aux_hidden_state_layer_ids)):
        raise UserError(
            f"{folder}: config.json names auxiliary layers {ref.aux_layer_ids} (vLLM's ids) but the drafter was trained on "
            f"{trained_on}: it would read other layers than it knows"
        )
    mapping, have = getattr(model, "d2t", None), ref.offsets
    if (mapping is None) != (have is None) or (have is not None and not torch.equal(have, mapping.cpu().to(have.dtype))):
        raise UserError(f"{folder}: d2t maps drafts to other tokens than in training; the map was changed")
    worst, same, total = 0.0, 0, 0
    for e in expected:
        found = ref.chain(e.window.states, e.embeds)
        for step, (a, b, c) in enumerate(zip(found, e.rounded, e.trained, strict=True)):
            if (d := _distance(a, b)) > TOLERANCE:
                raise UserError(
                    f"{folder} does not compute what was trained: logits of drafting step {step + 1} differ by {d:.2g} of "
                    f"their size (allowed {TOLERANCE}){_guess(ref, e)}"
                )
            worst = max(worst, d)
            same += int((a.argmax(-1) == c.argmax(-1)).sum())
            total += len(a)
    return {"max_difference": worst, "same_token": same / total}


def _orders(layers: int) -> list[tuple[int, ...]]:
    """Orders of the auxiliary layers to try, as stored first; with many layers there are too many."""
    return list(itertools.permutations(range(layers))) if layers <= 4 else [tuple(range(layers))]


def _reference(folder: Path) -> Reference:
    """reference.load; UserError where the configuration cannot be computed with."""
    from eagle3dvc.drafter import reference

    try:
        return reference.load(folder)
    except UserError:
        raise
    except Exception as e:  # of transformers' rope code among others
        raise UserError(
            f"{folder}/config.json: its decoder or rope settings cannot be computed with ({type(e).__name__}: {e})"
        ) from None


def _guess(ref: Reference, e: Wanted) -> str:
    """A hint at the cause: does another order of the auxiliary layers give the expected logits?"""
    for order in _orders(e.window.states.shape[1]):
        if list(order) != sorted(order):
            found = ref.chain(e.window.states[:, list(order)], e.embeds)
            if all(_distance(a, b) <= TOLERANCE for a, b in zip(found, e.rounded, strict=True)):
                return f": the auxiliary layers are swapped, fc.weight takes them in the order {list(order)}"
    return ": weights, rope or norm settings are not those it was trained with"


# ---------------------------------------------------------------- what the layout carries with it


def checksums(d: Drafter) -> dict[str, str]:
    """xxh3-128 of every tensor's bytes, by speculators' names."""
    return {name: _checksum(t) for name, t in sorted(d.tensors.items())}


def _checksum(t: torch.Tensor) -> str:
    import torch
    import xxhash

    return xxhash.xxh3_128_hexdigest(t.contiguous().flatten().view(torch.uint8).numpy())


def settings(d: Drafter) -> dict[str, Any]:
    """Everything besides tensors that changes what a drafter computes."""
    return {
        "aux_layer_ids": list(d.aux_layer_ids),
        "decoder": d.decoder,
        "draft_vocab_size": d.draft_vocab_size,
        "target_hidden_size": d.target_hidden_size,
        "verifier": d.verifier,
        **{flag: getattr(d, flag) for flag in layouts.NORM_FLAGS},
    }


def write_provenance(folder: Path, d: Drafter, verifier: dict[str, Any]) -> None:
    from eagle3dvc.stage import write_json

    write_json(
        folder / PROVENANCE,
        {
            "format": 1,
            "layer_id_convention": "id k is the residual stream after k decoder layers (vLLM's); SGLang's id is k - 1",
            "settings": settings(d),
            "tensors": checksums(d),
            "verifier": verifier,
        },
    )


def write_probe(folder: Path, embed: torch.Tensor, w: Window) -> None:
    """Held-out states with the embeddings fed and the logits this folder gives: a check anyone can run again.

    The few logits kept name few entries of d2t, so its checksum goes along.
    """
    import torch

    from eagle3dvc.drafter import reference

    n = min(POSITIONS, len(w.states))
    w = Window(w.states[:n], w.tokens[: n + STEPS - 1])
    ref = reference.load(folder)
    embeds = embed[w.tokens]
    logits = torch.stack(ref.chain(w.states, [embeds[j : j + n] for j in range(STEPS)]))
    top = logits.topk(min(TOP, logits.shape[-1]), dim=-1)
    tensors = {
        "states": w.states.contiguous(),
        "embeds": embeds.contiguous(),
        "ids": ref.to_verifier(top.indices),
        "logits": top.values.float(),
        "draft_ids": top.indices,
    }
    said = {"aux_layer_ids": ref.aux_layer_ids, "d2t": _d2t_checksum(ref), "format": 1}
    meta = json.dumps(said, sort_keys=True)
    layouts.save_tensors(tensors, folder / PROBE, {"eagle3dvc": meta})


# ---------------------------------------------------------------- eagle3dvc verify-export


def verify_export(
    folder: str | Path,
    hidden: str | Path | None = None,
    verifier: str | Path = "data/verifier",
    prompts: str | Path = "data/prompts",
    trained: str | Path | None = None,
    structure_only: bool = False,
) -> list[dict[str, Any]]:
    """Check one layout, or every layout inside an export; returns what was checked, raises UserError with the reason.

    hidden: a cache of hidden states to draft from; then `verifier` (data/verifier) and `prompts` are read too.
    trained: a folder of models/drafter to compare the logits with. Without these and without a probe in the folder the
    arithmetic cannot be checked, which is an error unless `structure_only`.
    """
    folder = Path(folder)
    inside = [folder / name for name in layouts.LAYOUTS if (folder / name).is_dir()]
    if not (folder / "config.json").is_file() and inside:
        found = [r for f in inside for r in verify_export(f, hidden, verifier, prompts, trained, structure_only)]
        for r, f in zip(found, inside, strict=True):
            if r["layout"] != f.name:
                raise UserError(f"{f} holds the {r['layout']} layout: an engine given this folder would take it for another")
        return found
    d, config = layouts.read(folder), layouts.read_config(folder)
    report: dict[str, Any] = {"folder": str(folder), "layout": layouts.detect(config, folder)}
    layouts.check_names(folder, report["layout"])
    layouts.check_config(config, d, report["layout"], folder)
    layouts.check_verifier_name(d.verifier, f"{folder}: ")
    if lost := layouts.unrepresentable(d, report["layout"]):
        raise UserError(f"{folder}: this layout cannot represent {'; '.join(lost)}: engines would ignore it")
    report["checked"] = ["structure"]
    if (folder / PROVENANCE).exists():
        _check_provenance(folder, d)
        report["checked"].append("provenance")
    if (folder / PROBE).exists():
        report["probe_difference"] = _check_probe(folder)
        report["checked"].append("probe")
    if trained is not None:
        report |= _check_trained(folder, d, hidden, verifier, prompts, trained)
        report["checked"].append("trained")
    if hidden is not None:
        report |= _check_hidden(folder, d, hidden, verifier, prompts)
        report["checked"].append("hidden states")
    if not structure_only and not {"probe", "trained", "hidden states"} & set(report["checked"]):
        raise UserError(
            f"{folder}: names and shapes are right, but without {PROBE} or a cache of hidden states nothing shows that it "
            "drafts: give --hidden and --verifier, or --structure-only to stop here"
        )
    return [report]


def provenance(folder: Path, d: Drafter | None = None) -> dict[str, Any]:
    """What the folder's provenance says of its verifier, {} where it has none; UserError where anything was changed since.

    d: the folder's drafter, where it has been read already.
    """
    if not (folder / PROVENANCE).exists():
        return {}
    said = _check_provenance(folder, d or layouts.read(folder)).get("verifier")
    return said if isinstance(said, dict) else {}


def _check_provenance(folder: Path, d: Drafter) -> dict[str, Any]:
    """The folder's provenance; UserError where it is not this drafter's."""
    try:
        said = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        was, sums = dict(said["settings"]), dict(said["tensors"])
        was_ids, was_decoder = was.pop("aux_layer_ids"), dict(was.pop("decoder"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{folder / PROVENANCE} is damaged ({e!r}): export again") from None
    now = settings(d)
    if now["aux_layer_ids"] != was_ids:
        raise UserError(
            f"{folder}: config.json names auxiliary layers {now['aux_layer_ids']} (vLLM's ids) but the drafter was trained "
            f"on {was_ids}: it would read other layers than it knows"
        )
    for key in sorted(was_decoder.keys() | now["decoder"].keys()):
        a, b = now["decoder"].get(key), was_decoder.get(key)
        if a != b:
            raise UserError(f"{folder}: {key} is {a} in config.json but was {b} in training")
    for key in sorted((now.keys() | was.keys()) - {"decoder", "aux_layer_ids"}):
        if now.get(key) != was.get(key):
            raise UserError(f"{folder}: {key} is {now.get(key)!r} in config.json but was {was.get(key)!r} at export")
    have = checksums(d)
    for name in sorted(sums.keys() | have.keys()):
        if name not in have:
            raise UserError(f"{folder}: tensor {name} was exported but is missing now")
        if have[name] != sums.get(name):
            hint = _what_changed(folder, d, name)
            raise UserError(f"{folder}: tensor {name} is not the one that was exported (its checksum differs){hint}")
    return said


def _what_changed(folder: Path, d: Drafter, name: str) -> str:
    if name == "d2t":
        return ": drafts would mean other tokens"
    if name == "fc.weight" and (folder / PROBE).is_file():
        try:
            _check_probe(folder)
        except UserError as e:
            return f"; {str(e).split(': ', 1)[-1]}"
    return ""


def _d2t_checksum(ref: Reference) -> str | None:
    return None if ref.offsets is None else _checksum(ref.offsets)


def _check_probe(folder: Path) -> float:
    """Compute the probe again; returns the largest difference, raises UserError when it is more than rounding."""
    import torch
    from safetensors import SafetensorError, safe_open

    ref = _reference(folder)
    try:
        with safe_open(folder / PROBE, "pt") as f:
            said = json.loads(f.metadata()["eagle3dvc"])
            ids = said["aux_layer_ids"]
            p = {name: f.get_tensor(name) for name in ("states", "embeds", "ids", "logits", "draft_ids")}
        _check_probe_shapes(p, ref)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as e:
        raise UserError(f"{folder / PROBE} is damaged ({e}): export again") from None
    if ref.aux_layer_ids != ids:
        raise UserError(
            f"{folder}: config.json names auxiliary layers {ref.aux_layer_ids} (vLLM's ids) but the drafter was trained on "
            f"{ids}: it would read other layers than it knows"
        )
    n, worst = len(p["states"]), 0.0
    steps = len(p["logits"])
    embeds = [p["embeds"][j : j + n] for j in range(steps)]
    for step, logits in enumerate(ref.chain(p["states"], embeds)):
        if p["draft_ids"].max() >= logits.shape[-1]:
            raise UserError(f"{folder}: the draft vocabulary is smaller than the one exported")
        d = _distance(logits.gather(-1, p["draft_ids"][step]), p["logits"][step])
        best = logits.max(-1).values.float() - p["logits"][step][:, 0]
        if d > TOLERANCE or best.max() > TOLERANCE * p["logits"][step].abs().max():
            hint = _guess_probe(ref, p, embeds)
            raise UserError(
                f"{folder}: on the held-out states it carries, drafting step {step + 1} gives other logits than at export "
                f"(difference {d:.2g} of their size, allowed {TOLERANCE}){hint}"
            )
        worst = max(worst, d)
    same_map = said.get("d2t", _d2t_checksum(ref)) == _d2t_checksum(ref)  # probes made before this was recorded lack it
    if not same_map or not torch.equal(ref.to_verifier(p["draft_ids"]), p["ids"]):
        raise UserError(f"{folder}: d2t maps drafts to other tokens than at export, though the logits agree")
    return worst


def _check_probe_shapes(p: dict[str, torch.Tensor], ref: Reference) -> None:
    """ValueError where the probe's tensors do not belong together or to this drafter."""
    n = len(p["states"])
    steps, positions, top = p["logits"].shape
    if not (n and steps and top):
        raise ValueError("it holds nothing to compare with")
    want = {
        "states": (n, len(ref.aux_layer_ids), p["states"].shape[-1]),
        "embeds": (n + steps - 1, ref.decoder["hidden_size"]),
        "ids": (steps, n, top),
        "draft_ids": (steps, n, top),
    }
    for name, shape in want.items():
        if tuple(p[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(p[name].shape)}, expected {list(shape)}")
    if not n or positions != n or p["states"].shape[1] * p["states"].shape[2] != ref.weights["fc.weight"].shape[1]:
        raise ValueError(f"its states {list(p['states'].shape)} do not fit the drafter")
    if p["draft_ids"].dtype != p["ids"].dtype or p["ids"].is_floating_point() or p["draft_ids"].min() < 0:
        raise ValueError("its token ids are no ids")


def _guess_probe(ref: Reference, p: dict[str, torch.Tensor], embeds) -> str:
    for order in _orders(p["states"].shape[1]):
        if list(order) != sorted(order):
            logits = ref.chain(p["states"][:, list(order)], embeds[:1])[0]
            if _distance(logits.gather(-1, p["draft_ids"][0]), p["logits"][0]) <= TOLERANCE:
                return f": the auxiliary layers are swapped, fc.weight takes them in the order {list(order)}"
    return ": weights, rope or norm settings were changed"


def _check_trained(folder: Path, d: Drafter, hidden, verifier, prompts, trained) -> dict[str, Any]:
    from eagle3dvc.drafter import model as drafter_model

    if hidden is None:
        raise UserError("--trained needs --hidden: the logits are compared on held-out hidden states")
    layouts.read(Path(trained))
    model = drafter_model.load(trained, verifier)
    result = self_check(folder, model, wanted(model, d.tensors["fc.weight"].dtype, windows(hidden, prompts)))
    return {f"trained_{k}": v for k, v in result.items()}


def _check_hidden(folder: Path, d: Drafter, hidden, verifier, prompts) -> dict[str, Any]:
    """Draft from cached states and see how often the first draft is what the verifier says next, with every order of the
    auxiliary layers. Rope settings cannot be judged this way: a wrong one costs acceptance but leaves no clear trace."""
    import torch

    from eagle3dvc.hidden_states.reader import HiddenStates
    from eagle3dvc.verifier import load_head, load_info

    info, data = load_info(verifier), HiddenStates(hidden, prompts)
    if info.name != d.verifier:
        raise UserError(f"{folder} is a drafter of {d.verifier}, {verifier} is {info.name}")
    if list(data.layer_ids[:-1]) != list(d.aux_layer_ids):
        raise UserError(
            f"{folder}: config.json names auxiliary layers {list(d.aux_layer_ids)} (vLLM's ids), the hidden states hold "
            f"{list(data.layer_ids[:-1])}: the ids are shifted, or the cache is another drafter's"
        )
    head, ref = load_head(verifier), _reference(folder)
    orders = _orders(len(d.aux_layer_ids))
    right: dict[tuple[int, ...], list[torch.Tensor]] = {order: [] for order in orders}
    total = 0
    for w, item in samples_of(data, 192):
        says = head.logits(item.hidden_states[1 : len(w.states) + 1, -1].float()).argmax(-1)
        for order in orders:
            logits = ref.chain(w.states[:, list(order)], [head.embed[w.fed(0)]], torch.float32)[0]
            right[order].append(ref.to_verifier(logits.argmax(-1)) == says)
        total += len(says)
        if total >= JUDGED:
            break
    if not total:
        raise UserError(f"{hidden} holds no sample longer than {STEPS} tokens: nothing to check with")
    hits = {order: torch.cat(parts) for order, parts in right.items()}
    share = {order: h.float().mean().item() for order, h in hits.items()}
    given, best = orders[0], max(orders, key=share.get)
    better, worse = int((hits[best] & ~hits[given]).sum()), int((hits[given] & ~hits[best]).sum())
    if better - worse > 3 * (better + worse) ** 0.5:  # a difference of paired hits that chance gives one time in 700
        raise UserError(
            f"{folder}: the auxiliary layers are swapped: taken in the order {list(best)} the first draft is right "
            f"{share[best]:.0%} of the time, as stored {share[given]:.0%} (on {total} positions)"
        )
    if share[given] < 0.05:
        raise UserError(
            f"{folder}: the first draft is what the verifier says next only {share[given]:.1%} of the time on {total} "
            "positions: wrong d2t, rope, layer ids or weights, or an untrained drafter"
        )
    return {"first_draft_accuracy": round(share[given], 4), "positions": total}

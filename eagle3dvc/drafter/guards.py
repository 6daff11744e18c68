"""The known holes of speculators 0.9.0 around its Trainer, and what closes each of them here.

Every entry has a test in tests/drafter/test_guards.py that shows the hole in the installed version and the guard at work; the
first half of such a test fails when the library has closed its hole, which is how to see that a guard can go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from eagle3dvc.errors import UserError


@dataclass(frozen=True)
class Hole:
    """name; what the library does; where the guard is; how to see that it can go. All apply to `versions`."""

    name: str
    library: str
    guard: str
    goes_when: str
    versions: str = "speculators 0.9.0"


HOLES = (
    Hole(
        "device",
        "Trainer sets device_type to cuda where there is no accelerator, and its rank as the device",
        "trainer.DrafterTrainer.setup_trainer names the device",
        "Trainer(...).device_type is cpu on a machine without accelerator",
    ),
    Hole(
        "process group",
        "maybe_setup_distributed raises without an accelerator, so there is no gloo run on CPUs",
        "guards.process_group starts gloo or nccl and tells the library",
        "maybe_setup_distributed works under torchrun on a CPU",
    ),
    Hole(
        "signals",
        "SIGTERM ends run_training normally, exit code 0, with a folder that resume ignores",
        "trainer.DrafterTrainer.run_training saves at the next step and raises Interrupted, exit code 128 + signal",
        "with_graceful_shutdown re-raises",
    ),
    Hole(
        "checkpoints",
        "not atomic, the highest number counts finished or not, optimizer state in bfloat16, neither RNG nor data position",
        "checkpoints.Store: written beside, fsynced, renamed, marked with the size of every file; float32",
        "save_checkpoint keeps float32 moments and BaseCheckpointer skips unfinished folders",
    ),
    Hole(
        "gradient checkpointing",
        "refused for EAGLE-3, and whole layers could not be: each TTT step appends to one key-value cache",
        "model.checkpoint_gradients: the feed-forward blocks alone",
        "Eagle3DraftModel.supports_gradient_checkpointing is true",
    ),
    Hole(
        "max_steps",
        "train_epoch stops at max_steps, but run_training starts the next epoch, which takes one more step each",
        "trainer.DrafterTrainer.run_training counts steps, not epochs",
        "run_training looks at max_steps",
    ),
    Hole(
        "clipping",
        "clips at 1.0 whatever is set, every micro-batch, and has no gradient accumulation",
        "trainer.DrafterTrainer.train_step clips the whole step's gradient at train.max_grad_norm",
        "TrainerConfig has max_grad_norm and gradient_accumulation_steps",
    ),
    Hole(
        "not finite",
        "a NaN loss is stepped on, every later weight is NaN and training goes on",
        "trainer.DrafterTrainer.train_step checks loss and gradient before the step and names the samples",
        "Trainer raises on a loss that is not finite",
    ),
    Hole(
        "documents",
        "TTT step j compares the first j targets of a packed sample with the end of the sample before it",
        "data.target_mask masks the first ttt_steps - 1 rows",
        "align_for_step takes document_ids",
    ),
    Hole(
        "mask shift",
        "shift_batch takes the mask of the token the target stands on, not of the token it predicts",
        "data.target_mask shifts by two",
        "shift_batch drops the last position of the mask",
    ),
    Hole(
        "lost samples",
        "a sample whose tokens differ from the cache, or is missing, is dropped with a warning",
        "hidden_states.reader raises; data.usable raises for a sample longer than a batch (the library truncates)",
        "ArrowDataset raises on a token mismatch with on_missing='raise'",
    ),
    Hole(
        "verifier weights",
        "a missing lm_head becomes embed_tokens, a missing final norm some layer's norm or ones, a scaled norm (Gemma) a plain one",
        "model.instantiate takes them from data/verifier and compares its targets with the verifier's head",
        "_load_verifier_weights raises for a missing tensor and Eagle3DraftModel uses resolve_verifier_norm_class",
    ),
    Hole(
        "draft vocabulary",
        "a missing token_freq.pt silently means the whole vocabulary",
        "vocab.choose is always called, with a size that is checked",
        "TrainConfig refuses a draft_vocab_size without frequencies",
    ),
    Hole(
        "accuracy",
        "compute_accuracy_single_step selects by the mask: every TTT step waits for the GPU and splits the compiled graph, and the "
        "GPU is without work for 19 of 161 ms a step (H200, drafter of an 8B verifier)",
        "guards.counted_accuracy, which counts the same, takes its place (guards.no_waiting)",
        "compute_accuracy_single_step has no masked_select",
    ),
    Hole(
        "compiled everywhere",
        "Eagle3DraftModel.forward is compiled wherever there is a GPU, for tensors on the CPU too, where torch 2.11 writes C++ that "
        "does not build; samples of many lengths are compiled again and again",
        "guards.uncompiled around the export's self-check and the walks of evaluate",
        "conditional_torch_compile looks at the tensors' device",
    ),
    Hole(
        "sliding window",
        "draft layers have a 2048-token window unless full_attention_indices names them",
        "model.layer_config sets layer_types",
        "create_transformer_layer_config defaults to full attention",
    ),
    Hole(
        "frozen head",
        "the drafter's lm_head stays a frozen copy of the verifier's rows and cannot be trained",
        "train.train_lm_head decides (trainer settings in train._prepare)",
        "_load_verifier_weights leaves lm_head.requires_grad alone",
    ),
    Hole(
        "warm start",
        "from_pretrained trains in the checkpoint's bfloat16, where small updates are lost, and may rebuild the vocabulary map",
        "model.put_weights copies into float32 weights; the map comes from the checkpoint",
        "from_pretrained followed by training gives float32 parameters",
    ),
    Hole(
        "acceptance",
        "validation metrics average over positions and ignore targets outside the draft vocabulary, which reports too much",
        "acceptance.walk selects the best checkpoint",
        "val_epoch reports a walk",
    ),
)

TESTED = "0.9.0"


def check_version() -> None:
    """Raise UserError where another minor version of speculators is installed: the guards were written for this one."""
    from importlib.metadata import version

    found = version("speculators")
    if found.split(".")[:2] != TESTED.split(".")[:2]:
        raise UserError(
            f"speculators {found} is installed, this project is tested with {TESTED} and guards holes of that version: install "
            f"speculators=={TESTED}, or go through eagle3dvc/drafter/guards.py with the new one"
        )


@contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """(rank, world size); under torchrun joins the group (nccl, or gloo on CPUs) and tells speculators' topology module."""
    import os

    if "LOCAL_RANK" not in os.environ:
        yield 0, 1
        return
    import torch
    import torch.distributed as dist
    from speculators.train import distributed as library

    local = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=torch.device("cuda", local) if cuda else None)
    library._local_rank, library._rank, library._world_size = local, dist.get_rank(), dist.get_world_size()
    library._is_distributed = True
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        library._local_rank, library._rank, library._world_size, library._is_distributed = 0, 0, 1, False
        dist.destroy_process_group()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Library code inside runs as it is written, whatever it decorated with torch.compile."""
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


def counted_accuracy(pred_ids: Any, target_ids: Any, loss_mask: Any, prev_correct: Any) -> tuple[Any, Any, Any, Any]:
    """What speculators.models.metrics.compute_accuracy_single_step returns (correct, of all, correct, of those correct before;
    float32 []) and does (prev_correct, bool [1, T], becomes what is correct still), without the sizes of selections."""
    import torch

    correct = pred_ids == target_ids
    counted = torch.ones_like(correct) if loss_mask is None else loss_mask.to(torch.bool)
    before = torch.ones_like(correct) if prev_correct is None else prev_correct
    cond_total = before.sum().float()
    if prev_correct is not None:
        correct = torch.logical_and(prev_correct, correct, out=prev_correct)
    right = torch.logical_and(correct, counted).sum().float()
    return right, counted.sum().float(), right.clone(), cond_total


def no_waiting() -> None:
    """Put :func:`counted_accuracy` in the library's place, for this process."""
    from speculators.models.eagle3 import metrics

    metrics.compute_accuracy_single_step = counted_accuracy


def loss_implementation(device: Any, compiled: bool) -> str:
    """`fused` (Triton) or `eager`: the fused losses need CUDA, and fail inside torch.compile with torch 2.11 (an assertion on the
    Triton autotuner's configurations), where compiling the eager ones fuses them anyway."""
    return "eager" if device.type != "cuda" or compiled else "fused"

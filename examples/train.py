"""Trains a small GPT on real text: with FSDP2 and others under torchrun, or as one plain process.

    torchrun --standalone --nproc-per-node 2 examples/train.py --optimizer muon --lr 1e-2
    torchrun --standalone --nproc-per-node 4 examples/train.py --tp 2
    torchrun --standalone --nproc-per-node 4 examples/train.py --hsdp 2
    torchrun --standalone --nproc-per-node 2 examples/train.py --zero2
    torchrun --standalone --nproc-per-node 2 examples/train.py --offload
    torchrun --standalone --nproc-per-node 2 examples/train.py --qk-clip 100
    python examples/train.py --optimizer adamw

Muon comes from the Hub by `get_kernel`, or from this checkout once `make build` was run. Other
scripts call `train(config)` within `ranks.launch`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from data import load_corpus, train_batch, val_batches
from history import History, Row, plot, plot_logits
from model import ModelConfig, Transformer
from ranks import launch, max_over_ranks, mean_over_ranks, pick_device, rank, world_size

Batch = tuple[Tensor, Tensor]  # inputs and next bytes, each (rows, seq_len)


def option(default: Any, help: str, **kwargs: Any) -> Any:
    return field(default=default, metadata={"help": help, **kwargs})


@dataclass(frozen=True)
class TrainConfig:
    optimizer: str = option("muon", "which optimizer", choices=("muon", "adamw"))
    lr: float = option(1e-2, "peak learning rate; of the matrices alone, with --adamw-lr")
    adamw_lr: float = option(0.0, "peak rate of embeddings, head and norms; 0: as --lr")
    weight_decay: float = option(0.1, "decoupled weight decay, on every parameter")
    steps: int = option(200, "updates that the learning-rate schedule spans")
    warmup: int = option(20, "updates of linear warm-up; a linear decay to 0 follows")
    batch_size: int = option(24, "sequences per update, over all ranks")
    seq_len: int = option(48, "bytes per sequence")
    grad_clip: float = option(1.0, "largest gradient norm; --zero2 clips nothing")
    seed: int = option(0, "of the weights and of the order of the data")
    eval_every: int = option(20, "updates between validations")
    eval_batches: int = option(8, "batches per validation")

    dim: int = option(128, "model width")
    layers: int = option(2, "model depth")
    heads: int = option(4, "query heads")
    kv_heads: int = option(2, "key and value heads")
    hidden_dim: int = option(384, "width of the SwiGLU, or of each expert")
    experts: int = option(0, "experts per layer; 0 is a dense model")
    top_k: int = option(2, "experts per token")
    tp: int = option(1, "ranks that divide each layer among them (tensor parallelism)")
    hsdp: int = option(1, "replicas of the shards (HSDP)")
    ddp: bool = option(False, "whole weights on every rank, gradients averaged by DDP")
    zero2: bool = option(False, "whole weights on every rank, Muon averages the gradients")
    reshard: bool = option(False, "free gathered weights before backward, to save memory")
    offload: bool = option(
        False, "keep Muon's optimizer state in host memory between steps; changes nothing on a CPU"
    )
    qk_clip: float = option(
        0.0,
        "largest attention logit that QK-Clip allows; trains once more without it, to draw both; "
        "0 is off",
    )
    balance_weight: float = option(0.01, "weight of the experts' load-balancing loss")

    out: str = option(
        "runs/train", "folder for log.csv and plots of the loss; empty writes nothing"
    )
    checkpoint_dir: str = option("", "folder for checkpoints; empty saves none")
    save_every: int = option(100, "updates between checkpoints; the end is always saved")
    resume: bool = option(False, "continue from the newest checkpoint in --checkpoint-dir")
    stop_after: int = option(0, "end early, as a time limit would; 0 runs the whole schedule")


def train(config: TrainConfig, label: str = "", quiet: bool = False) -> History:
    """One run, from the weights' initialization to the last validation."""
    check_layout(config)
    device = pick_device()
    batches = Batches(config, device)
    run = Run.start(config, device)
    if config.resume:
        run.load_newest(config.checkpoint_dir)
    elif config.checkpoint_dir and any(Path(config.checkpoint_dir).glob("step-*")):
        raise SystemExit(
            f"--checkpoint-dir {config.checkpoint_dir!r} holds another run's checkpoints: continue "
            "it with --resume and the same options, or name another folder"
        )
    history, csv_path = History(), None
    if config.out and rank() == 0:
        csv_path = Path(config.out, "log.csv")
        if config.resume:
            history = History.read_csv(csv_path, through_step=run.step)
        history.write_csv(csv_path)

    last_step = min(config.steps, config.stop_after or config.steps)
    with progress_bar(config, label, run.step, quiet) as bar:
        while run.step < last_step:
            row = run.advance(batches)
            history.rows.append(row)
            if csv_path:
                history.append_csv(csv_path)
            saves = run.step == last_step or run.step % config.save_every == 0
            if config.checkpoint_dir and saves:
                run.save(config.checkpoint_dir)
            show(bar, row)
    return history


class Run(Stateful):
    """Everything that changes while training, which is also what a checkpoint holds."""

    def __init__(self, config: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, config))
        self.recorder: Any = None
        if config.qk_clip:
            self.recorder = load_kernel().QKLogitRecorder(model)
            optimizer.qk_recorder = self.recorder  # type: ignore[attr-defined]
        self.step = 0
        self.seconds = 0.0  # of updates alone

    @classmethod
    def start(cls, config: TrainConfig, device: torch.device) -> Run:
        model = build_model(config, device)
        return cls(config, model, build_optimizer(config, model))

    def advance(self, batches: Batches) -> Row:
        """One update, and a validation where one is due."""
        config, lr = self.config, float(self.scheduler.get_last_lr()[0])
        batch = batches.train(self.step)
        start = time.perf_counter()
        train_loss = self.update(batch)
        self.seconds += time.perf_counter() - start
        seen, left = self.largest_logits(batch) if self.recorder else (None, None)
        tokens = self.step * config.batch_size * config.seq_len
        due = self.step == config.steps or self.step % config.eval_every == 0
        val_loss = self.validate(batches.val) if due else None
        return Row(self.step, self.seconds, tokens, lr, train_loss, val_loss, seen, left)

    def update(self, batch: Batch) -> float:
        """One update; returns the loss that it was computed from, averaged over ranks."""
        loss, balance = self.losses(batch)
        (loss + self.config.balance_weight * balance).backward()
        if not self.config.zero2:  # whose gradients are no averages before the step
            clip_grad_norm(self.model, self.config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.step += 1
        return mean_over_ranks(loss.detach())

    @torch.no_grad()
    def validate(self, batches: list[Batch]) -> float:
        losses = [self.losses(batch)[0] for batch in batches]
        self.reshard()
        return mean_over_ranks(torch.stack(losses).mean())

    def largest_logits(self, batch: Batch) -> tuple[float, float]:
        """What the update's own forward saw, over all ranks, and what its batch has after it."""
        seen = self.optimizer.qk_clip_stats()["max_logit"]  # type: ignore[attr-defined]
        self.losses(batch)
        self.reshard()
        heads = [local(of_layer).max() for of_layer in self.recorder.take().values()]
        return seen, max_over_ranks(torch.stack(heads).max())

    def reshard(self) -> None:
        """Frees the weights that a forward gathered, where no backward will do it."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy in nats per byte, and the experts' balance."""
        inputs, targets = batch
        logits, balance = self.model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), balance

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.seconds = state["step"], state["seconds"]

    def save(self, folder: str) -> None:
        dcp.save({"run": self}, checkpoint_id=Path(folder, f"step-{self.step:06d}"))

    def load_newest(self, folder: str) -> None:
        # The metadata is written last: a checkpoint without it was cut off.
        complete = sorted(path.parent for path in Path(folder).glob("step-*/.metadata"))
        if not folder or not complete:
            raise SystemExit(f"--resume: no checkpoint in --checkpoint-dir {folder!r}")
        dcp.load({"run": self}, checkpoint_id=complete[-1])


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Batches:
    """This rank's share of the training and validation text, on the device."""

    def __init__(self, config: TrainConfig, device: torch.device):
        # The ranks that divide a layer among them see the same text.
        self.rank, self.world_size = rank() // config.tp, world_size() // config.tp
        if config.batch_size % self.world_size:
            raise SystemExit(
                f"--batch-size {config.batch_size} does not divide over {self.world_size} ranks"
            )
        self.config = config
        self.device = device
        self.text, val_text = load_corpus()
        self.val = [
            self.to_device(batch)
            for batch in val_batches(
                val_text,
                config.batch_size,
                config.seq_len,
                config.eval_batches,
                self.rank,
                self.world_size,
            )
        ]

    def train(self, step: int) -> Batch:
        c = self.config
        return self.to_device(
            train_batch(
                self.text, c.batch_size, c.seq_len, c.seed, step, self.rank, self.world_size
            )
        )

    def to_device(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return inputs.to(self.device), targets.to(self.device)


def check_layout(config: TrainConfig) -> None:
    """Options that say how the model lies on the ranks fit each other and the ranks."""
    if min(config.hsdp, config.tp) < 1 or world_size() % (config.hsdp * config.tp):
        raise SystemExit(
            f"--hsdp {config.hsdp} times --tp {config.tp} does not divide {world_size()} ranks"
        )
    if config.ddp + config.zero2 + (config.hsdp * config.tp > 1) > 1:
        raise SystemExit("--ddp, --zero2, and --hsdp or --tp exclude each other")
    if (config.ddp or config.zero2) and not dist.is_initialized():
        raise SystemExit("--ddp and --zero2 need ranks: start with torchrun")
    if config.zero2 and config.grad_clip != TrainConfig.grad_clip:
        raise SystemExit("--zero2 clips nothing: before the step no rank has the mean gradients")
    if config.zero2 and config.optimizer != "muon":
        raise SystemExit("--zero2 is Muon's: torch.optim.AdamW averages no gradients")
    if config.offload and config.optimizer != "muon":
        raise SystemExit("--offload is Muon's: torch.optim.AdamW keeps its state on the device")
    if not 0 <= config.qk_clip < float("inf"):
        raise SystemExit(f"--qk-clip {config.qk_clip:g} is no bound; 0 is off")
    if config.qk_clip and config.optimizer != "muon":
        raise SystemExit("--qk-clip is Muon's: torch.optim.AdamW clips no weights")


def build_model(config: TrainConfig, device: torch.device) -> nn.Module:
    shared = {f.name for f in fields(ModelConfig)} & {f.name for f in fields(TrainConfig)}
    model_config = ModelConfig(
        max_seq_len=config.seq_len, **{name: getattr(config, name) for name in shared}
    )
    torch.manual_seed(config.seed)  # the same weights on every rank, before they are sharded
    model = Transformer(model_config).to(device)
    if not dist.is_initialized() or config.zero2:
        return model
    if config.ddp:
        return DistributedDataParallel(model)
    shard(model, config, device)
    return model


def shard(model: Transformer, config: TrainConfig, device: torch.device) -> None:
    """FSDP2, over replicas of shards with --hsdp, over tensor parallelism with --tp."""
    shards = world_size() // (config.hsdp * config.tp)
    names = ("replicas", "shards", "tp")
    mesh = init_device_mesh(device.type, (config.hsdp, shards, config.tp), mesh_dim_names=names)
    if config.tp > 1:
        apply_tp(model, mesh["tp"])
    # The parameters that TP leaves whole are alike on all of "tp".
    kwargs: dict[str, Any] = {
        "mesh": mesh["replicas", "shards"] if config.hsdp > 1 else mesh["shards"],
        "reshard_after_forward": config.reshard,
    }
    if device.type != "cpu":
        # No cast of inputs: activations are bf16 already, and RoPE's table stays fp32.
        kwargs["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
    for layer in model.layers:
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)


def apply_tp(model: Transformer, mesh: DeviceMesh) -> None:
    """Divides heads and hidden units among ranks; embeddings, norms and experts stay whole."""
    c = model.config
    hidden_dim = 0 if c.experts else c.hidden_dim
    if any(count % mesh.size() for count in (c.heads, c.kv_heads, hidden_dim)):
        raise SystemExit(
            f"--tp {mesh.size()} must divide --heads {c.heads}, --kv-heads {c.kv_heads} and, of a "
            f"dense model, --hidden-dim {c.hidden_dim}"
        )
    plan: dict[str, ParallelStyle] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
    }
    if not c.experts:
        plan |= {
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(),
        }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def clip_grad_norm(model: nn.Module, max_norm: float) -> None:
    """`nn.utils.clip_grad_norm_`, which takes no parameters of several meshes, mesh by mesh."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for param in model.parameters():
        by_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)
    norms = []
    for params in by_mesh.values():
        norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for params in by_mesh.values():
        nn.utils.clip_grads_with_norm_(params, max_norm, total)


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    kernel = load_kernel()
    expert_keys = ["experts"] if config.experts else None
    groups = kernel.get_default_muon_param_groups(
        model, expert_keys=expert_keys, adamw_lr=config.adamw_lr or config.lr
    )
    if config.optimizer == "adamw":  # the same groups, so that both have two learning rates
        return torch.optim.AdamW(
            [{"params": group["params"], "lr": group.get("lr", config.lr)} for group in groups],
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            fused=True,
        )
    optimizer = kernel.Muon(
        groups,
        lr=config.lr,
        weight_decay=config.weight_decay,
        process_group=dist.group.WORLD if config.ddp or config.zero2 else None,
        grad_reduce="mean" if config.zero2 else None,
        clip_config=(
            {"head_dim": config.dim // config.heads, "threshold": config.qk_clip}
            if config.qk_clip
            else None
        ),
    )
    if config.offload:
        on_host = all(param.device.type == "cpu" for param in model.parameters())
        if on_host and rank() == 0:
            print("--offload has nothing to do: the parameters are on the CPU")
        optimizer.turn_on_cpu_offload()
    return optimizer


@lru_cache(maxsize=1)
def load_kernel() -> Any:
    from kernels import get_kernel

    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "build").is_dir():  # made by `make build`
        os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={checkout}")
    return get_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])


def lr_factor(step: int, config: TrainConfig) -> float:
    """Linear warm-up to 1, then linear decay that would reach 0 after the last update."""
    warm = (step + 1) / max(1, config.warmup)
    decay = (config.steps - step) / max(1, config.steps - config.warmup)
    return max(0.0, min(1.0, warm, decay))


def progress_bar(config: TrainConfig, label: str, step: int, quiet: bool) -> tqdm:
    return tqdm(
        total=config.steps,
        initial=step,
        desc=label or config.optimizer,
        unit="step",
        disable=quiet or rank() != 0,
        mininterval=0.25 if sys.stderr.isatty() else 10,  # a log file keeps every redraw
        dynamic_ncols=True,
    )


def show(bar: tqdm, row: Row) -> None:
    shown = {"loss": f"{row.train_loss:.3f}", "tok/s": f"{row.tokens / row.seconds:,.0f}"}
    if row.val_loss is not None:
        shown["val"] = f"{row.val_loss:.3f}"
    bar.set_postfix(shown, refresh=False)
    bar.update()


class Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


D = TypeVar("D", bound=Dataclass)


def parse_config(cls: type[D], description: str) -> D:
    """Command line options from a dataclass: --some-name for each field `some_name`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for f in fields(cls):
        flag = "--" + f.name.replace("_", "-")
        kwargs = dict(f.metadata)
        if isinstance(f.default, bool):
            kwargs["action"] = "store_true"
        else:
            kwargs["type"] = type(f.default)
        parser.add_argument(flag, default=f.default, **kwargs)
    return cls(**vars(parser.parse_args()))


def main() -> None:
    config = parse_config(TrainConfig, __doc__.splitlines()[0])
    history = train(config, label="muon, QK-Clip" if config.qk_clip else "")
    unclipped = train(without_clip(config), label="muon") if config.qk_clip else History()
    if rank() == 0 and history.rows:
        report(config, history)
        if config.qk_clip and config.out and unclipped.rows:
            report_logits(config, history, unclipped)


def without_clip(config: TrainConfig) -> TrainConfig:
    """The same run, in folders within its own; no logit reaches its bound."""
    out, checkpoints = (
        str(Path(folder, "unclipped")) if folder else ""
        for folder in (config.out, config.checkpoint_dir)
    )
    return replace(config, qk_clip=1e30, out=out, checkpoint_dir=checkpoints)


def report(config: TrainConfig, history: History) -> None:
    name, last = {"muon": "Muon", "adamw": "AdamW"}[config.optimizer], history.last
    loss = f"validation loss {history.final_val_loss:.4f} nats per byte"
    rates = f"lr {config.lr:g}" + (f", rest {config.adamw_lr:g}" if config.adamw_lr else "")
    print(
        f"{name}, {rates}: {last.step} of {config.steps} steps in {last.seconds:.1f} s, "
        f"{history.tokens_per_second:,.0f} tokens/s, "
        f"{loss if history.validations else 'no validation yet'}"
    )
    if config.out and not history.validations:
        print(f"log: {Path(config.out, 'log.csv')}; no plot before the first validation")
    elif config.out:
        title = f"{name} reaches a loss of {history.final_val_loss:.2f} in {last.step} steps"
        subtitle = f"Validation loss, and training loss (pale); {rates}; ranks: {world_size()}"
        files = plot(Path(config.out, "loss.png"), title, subtitle, {name: [history]})
        print(f"plot: {files}\nlog: {Path(config.out, 'log.csv')}")


def report_logits(config: TrainConfig, clipped: History, unclipped: History) -> None:
    files = plot_logits(Path(config.out, "logits.png"), config.qk_clip, clipped, unclipped)
    for name, history in (("with QK-Clip", clipped), ("without", unclipped)):
        after, before = (largest / config.qk_clip for largest in history.largest_logits)
        print(
            f"{name}: logits up to {after:.2f} × the threshold after a step ({before:.2f} × before "
            f"it, in a new batch); validation loss {history.final_val_loss:.4f}"
        )
    print(f"plot: {files}\nlog: {Path(without_clip(config).out, 'log.csv')}")


if __name__ == "__main__":
    launch(main)

#!/usr/bin/env python3
"""Train a small character model with PyTorch so that a preemption changes nothing in the result.

Everything that spotq needs is plain: it restores SPOTQ_CHECKPOINT_DIR before the start, and this program resumes
from the newest step-<n>.pt there. The rest is optional: it reports its progress to SPOTQ_PROGRESS_FILE, and saves at
once on USR1 and when SPOTQ_NOTICE_FILE appears. On TERM it saves and exits with 143. Needs PyTorch 1.13 or newer.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

# The libraries below take seconds to load. Until there is something to save, a request to save must not kill.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)

import numpy as np
import torch
from torch import nn

CONTEXT, EMBED, HIDDEN, BATCH = 16, 16, 64, 32
SEED = 20
KEEP = 2  # One to resume from, and one more in case that one is damaged.


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps to train for")
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parent.parent / "data" / "corpus.txt")
    parser.add_argument("--out", type=Path, help="final parameters, as .npz")
    parser.add_argument("--save-every", type=int, default=50, help="steps between saves; 0 for never")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--step-ms", type=int, default=0, help="least time per step; changes nothing in the result")
    return parser.parse_args()


class Requests:
    """Notes signals and the notice file; the training loop acts on them between two steps."""

    def __init__(self):
        self.stop = self.save = self.notice_seen = False
        self.notice_file = os.environ.get("SPOTQ_NOTICE_FILE")
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop", True))
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "save", True))

    def take_save(self):
        present = bool(self.notice_file) and os.path.exists(self.notice_file)
        appeared = present and not self.notice_seen
        self.notice_seen = present
        wanted, self.save = self.save or appeared, False
        return wanted


class Progress:
    def __init__(self, total):
        path = os.environ.get("SPOTQ_PROGRESS_FILE")
        self.file = open(path, "a", buffering=1) if path else None
        self.total, self.last_step, self.last_time = total, None, 0.0

    def note(self, step):
        due = self.last_step is None or step >= self.last_step + 10 or time.monotonic() >= self.last_time + 0.2
        if self.file and (due or step >= self.total):
            self.file.write(json.dumps({"step": step, "total": self.total}) + "\n")
            self.last_step, self.last_time = step, time.monotonic()


class CharModel(nn.Module):
    """A recurrent network with dropout: the dropout makes the result depend on the random numbers' state."""

    def __init__(self, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, EMBED)
        self.drop = nn.Dropout(0.1)
        self.gru = nn.GRU(EMBED, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, vocab)

    def forward(self, contexts):
        states, _ = self.gru(self.drop(self.embed(contexts)))
        return self.out(states)


class Saves:
    """A directory of step-<n>.pt files that are whole whenever they have that name."""

    def __init__(self):
        directory = os.environ.get("SPOTQ_CHECKPOINT_DIR")
        self.directory = Path(directory) if directory else None
        self.last_step = None
        if self.directory:
            self.directory.mkdir(parents=True, exist_ok=True)

    def paths(self):
        """Newest first."""
        found = self.directory.glob("step-*.pt") if self.directory else []
        return sorted(found, key=lambda path: int(path.stem.split("-")[1]), reverse=True)

    def save(self, step, model, optimiser):
        if not self.directory or step == self.last_step:
            return
        path = self.directory / f"step-{step}.pt"
        temporary = self.directory / f".{path.name}.tmp"
        state = {
            "step": step,
            "model": model.state_dict(),
            "optimiser": optimiser.state_dict(),
            "rng": torch.get_rng_state(),
        }
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        self.last_step = step
        for old in self.paths()[KEEP:]:
            old.unlink()
        print(f"saved step {step}", flush=True)

    def restore(self, model, optimiser):
        """The step to go on from."""
        for path in self.paths():
            try:
                state = torch.load(path, map_location="cpu")
            except Exception as error:  # Whatever is wrong with it, an older one may be whole.
                print(f"skipping {path}: {error}", file=sys.stderr, flush=True)
                continue
            model.load_state_dict(state["model"])
            optimiser.load_state_dict(state["optimiser"])
            torch.set_rng_state(state["rng"])
            self.last_step = state["step"]
            return state["step"]
        return 0


def train_step(model, optimiser, symbols):
    starts = torch.randint(0, len(symbols) - CONTEXT, (BATCH,))
    window = symbols[starts[:, None] + torch.arange(CONTEXT + 1)]
    logits = model(window[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), window[:, 1:].reshape(-1))
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return loss


def write_final(path, model):
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        np.savez(file, **{name: value.numpy() for name, value in sorted(model.state_dict().items())})
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main():
    args = parse_args()
    requests = Requests()
    # One thread and deterministic kernels: sums in one order, so that a repeated step repeats every bit.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    text = np.frombuffer(args.data.read_bytes(), dtype=np.uint8)
    alphabet, indices = np.unique(text, return_inverse=True)
    symbols = torch.from_numpy(indices.astype(np.int64))
    model = CharModel(len(alphabet))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    saves = Saves()
    step = saves.restore(model, optimiser)
    attempt = os.environ.get("SPOTQ_ATTEMPT", "1")
    print(f"attempt {attempt}: starting at step {step} of {args.steps}", flush=True)
    progress = Progress(args.steps)
    progress.note(step)
    while step < args.steps and not requests.stop:
        if requests.take_save():
            saves.save(step, model, optimiser)
        began = time.monotonic()
        loss = train_step(model, optimiser, symbols)
        step += 1
        progress.note(step)
        if step % args.log_every == 0 or step == args.steps:
            print(f"step {step}/{args.steps} loss {loss.item():.2f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            saves.save(step, model, optimiser)
        time.sleep(max(0.0, began + args.step_ms / 1000 - time.monotonic()))
    saves.save(step, model, optimiser)
    if step < args.steps:
        return 143
    if args.out:
        write_final(args.out, model)
    print(f"done after {step} steps", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains a Llama on a dp x tp mesh and writes it as a Hugging Face model: python -m meshtrain.recipes.llama --help

`train_on_rank` is the whole of it, on the public API, for somebody who wants to write their own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtrain.errors import Refused
from meshtrain.recipes.runfile import read_settings

if TYPE_CHECKING:
    from torch import Tensor

    from meshtrain.recipes.prepare import Run

PROGRAM = "python -m meshtrain.recipes.llama"
REFUSAL_DELAY_S = 20.0
PROMPT = 16
"""Tokens of the data that the sample of text begins with."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 done, 1 failed, 2 refused, 3 restarts that led nowhere, 130 interrupted."""
    try:
        settings = read_settings(
            sys.argv[1:] if arguments is None else arguments,
            program=PROGRAM,
            description="Trains a Llama on a dp x tp mesh, and writes it as a Hugging Face model.",
        )
        # Only now what takes seconds to import: a mistyped flag is answered at once. All that the ranks need is here.
        from meshtrain.launch import preload, run

        preload(
            "meshtrain.recipes.prepare",
            "meshtrain.recipes.report",
            "meshtrain.recipes.saving",
            "meshtrain.train.generate",
            "meshtrain.train.loop",
        )
        from meshtrain.recipes.elastic import restarts_of
        from meshtrain.recipes.prepare import prepare

        prepared = prepare(settings)
        if prepared.finished:
            if _first_on_host():
                print(
                    f"{prepared.out} holds this run, and it is finished: nothing is left to do. Its model is {prepared.export}"
                )
            return 0
        # Its threads do not survive the fork; ranks only decode, and it would warn about them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        mesh = settings.mesh
        return run(
            train_on_rank,
            (prepared,),
            world_size=mesh.dp * mesh.tp,
            device=prepared.device,
            timeout_s=mesh.timeout,
            grace_s=mesh.timeout,  # for the step under way and the checkpoint after an interruption
            restarts=restarts_of(prepared),
        )
    except Refused as error:
        from meshtrain.train.console import refuse

        if not _first_on_host():
            # The first rank of this host finds the same fault, or the launcher ends all: one message is enough. But a
            # launcher that sees this rank end first would stop that one before it has said anything.
            time.sleep(REFUSAL_DELAY_S)
        refuse(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


def train_on_rank(run: Run) -> None:
    """What each rank does, from the mesh to the exported model. Raises KeyboardInterrupt after an interruption."""
    import torch.distributed as dist

    from meshtrain import adamw, init_mesh, learning_rate, parallelize, save_pretrained
    from meshtrain.data import TokenDataset
    from meshtrain.recipes.prepare import build
    from meshtrain.recipes.report import (
        agree,
        continued,
        introduce,
        recording,
        show_sample,
        sole_user,
        summarise,
        what_next,
    )
    from meshtrain.recipes.saving import begin, saving_of
    from meshtrain.train.console import RunConsole
    from meshtrain.train.loop import stop_on_interrupt, train
    from meshtrain.train.step import loss_in_model

    chosen, training, data, output = run.settings.mesh, run.settings.training, run.settings.data, run.settings.output
    mesh = init_mesh(chosen.dp, chosen.tp, run.device)
    tokens, out, export = agree(run)
    dataset = TokenDataset(tokens, data.seq_len, training.seed)
    console = RunConsole(quiet=dist.get_rank() != 0)
    introduce(console, run, dataset, out)

    model = build(run.config, run.master_dtype, "meta")
    parallelize(
        model,
        mesh,
        run.plan,
        sequence_parallel=chosen.sequence_parallel,
        loss_parallel=chosen.loss_parallel,
        param_dtype=run.compute_dtype,
        activation_checkpointing=chosen.activation_checkpoint == "full",
        seed=training.seed,
    )
    with sole_user(out), stop_on_interrupt() as stop:
        optimizer, start = begin(
            run, model, out, tokens, console, lambda: adamw(model, lr=training.lr, weight_decay=training.weight_decay)
        )
        # The position in the data is a number of sequences, which another global batch divides into other steps.
        offset = start.samples - start.step * data.global_batch

        def batches(step: int) -> list[tuple[Tensor, Tensor]]:
            own = dataset.batch(
                step - 1,
                global_batch=data.global_batch,
                dp=chosen.dp,
                dp_rank=mesh["dp"].get_local_rank(),
                micro_batch=data.micro_batch,
                offset=offset,
            )
            return [(batch.inputs.to(run.device), batch.labels.to(run.device)) for batch in own]

        def rate(step: int) -> float:
            return learning_rate(
                step, peak=training.lr, steps=training.steps, warmup=training.warmup_steps, schedule=training.schedule
            )

        with (
            recording(run, console, out, start.step) as report,
            saving_of(run, model, optimizer, out, tokens, start, console) as saving,
        ):
            trained = train(
                model,
                optimizer,
                batches,
                steps=training.steps,
                learning_rate=rate,
                tokens=lambda step: dataset.global_tokens(step - 1, global_batch=data.global_batch),
                max_norm=training.max_norm,
                loss_sum=loss_in_model,
                report=report,
                stop=stop,
                saving=saving,
                done=start.step,
                seen=start.tokens,
            )
        saved = saving is not None and not saving.lost
        summarise(console, trained, training.steps, checkpoint=saved)
        if trained.stopped and saved:
            what_next(console, run, out, None)
            raise KeyboardInterrupt
        save_pretrained(
            model,
            export,
            dtype=output.export_dtype,
            tokenizer=run.tokenizer,
            generation_config=dict(run.generation),
        )
        if output.sample and trained.steps and not trained.stopped:
            # The beginning of the sequence that would come next, as all ranks know it.
            prompt = (
                dataset.batch(offset + trained.steps * data.global_batch, global_batch=1, dp=1, dp_rank=0)[0]
                .inputs[0, :PROMPT]
                .tolist()
            )
            show_sample(console, run, prompt, continued(run, model, export, prompt))
    what_next(console, run, out, export)
    if trained.stopped:
        raise KeyboardInterrupt


def _first_on_host() -> bool:
    """Whether this process speaks for its host: ranks that torchrun or Slurm started all find the same fault."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"


if __name__ == "__main__":
    sys.exit(main())

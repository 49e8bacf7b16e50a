"""Pipelines as text: the stages of a split model."""

from __future__ import annotations

from autostream.reporting.tables import count, few, size, table, us
from autostream.scheduling.microbatches import Pipeline


def split_table(split: Pipeline) -> str:
    """A model's stages, one a row."""
    rows = [
        (
            str(at),
            few(names),
            us(stage.forward_us),
            us(stage.backward_us),
            size(stage.crossing_bytes) if at else "",
            size(stage.weight_bytes),
            size(memory),
        )
        for at, (stage, names, memory) in enumerate(
            zip(split.stages, split.submodules, split.memory_bytes, strict=True)
        )
    ]
    title = f"{split.model} in {count(len(rows), 'stage')} on {split.device}, {split.microbatches} microbatches a step"
    head = ("stage", "submodules", "forward", "backward", "bytes in", "weights", "memory")
    about = f"A step by 1F1B takes {us(split.step_us)}. Times and bytes in are of one microbatch."
    copies = f"Several stages have a copy of {few(split.shared)}: add up its gradients yourself."
    stages = table(title, head, rows, right="forward backward bytes weights memory")
    return "\n".join(part for part in (stages, about, split.shared and copies) if part)

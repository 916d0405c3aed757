"""Public facts about a trained model, and the Markdown card that explains them to readers."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from dpjax._core._guarantee import Guarantee, NeighboringRelation, concrete, shown_number
from dpjax._core._losses import Risk


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """The public facts of a training by DP-SGD, in the release of `learning.fit`.

    Attributes:
        steps: the number of steps that the guarantee covers.
        batch_size: the expected size of a batch.
        sampling: how batches were drawn: "poisson", "fixed", "bins" or "separated".
        slots: the public number of slots for records.
        rate: the probability that a record is in a batch of its group or bin, or in a batch that it
            may join.
        capacity: the number of slots of a batch.
        groups: the number b of groups or bins. A record joins at most one of any b consecutive
            batches. If sampling is "separated", the record may join any of the b batches.
            Otherwise, it may join only the batch of its group or bin.
        clip_norm: the clip norms, as strings.
        noise_multiplier: the least noise multiplier of a step.
        strategy: the number of bands of correlated noise; 1 for independent noise.
        parameters: the number of trained numbers.
        loss: the fingerprint of the loss.
        optimizer: the fingerprint of the optimizer's program.
        versions: the versions of packages, as (name, version).

    Formal guarantees:
        All attributes are public: they depend on arguments and shapes alone.
    """

    steps: int
    batch_size: float
    sampling: str
    slots: int
    rate: float
    capacity: int
    groups: int
    clip_norm: tuple[str, ...]
    noise_multiplier: float
    strategy: int
    parameters: int
    loss: str
    optimizer: str
    versions: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes as a dict for JSON."""
        return {**dataclasses.asdict(self), "versions": dict(self.versions)}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "TrainingRecord":
        """Returns the record that `to_json` converted to a dict."""
        versions = tuple((str(name), str(one)) for name, one in stored["versions"].items())
        norms = tuple(map(str, stored["clip_norm"]))
        return cls(**{**stored, "clip_norm": norms, "versions": versions})


# Contains one function, which computes the risk of a training from its record and its guarantee.
# `dpjax.learning` adds this function, because `_core` must not import `dpjax.learning`.
RISK_OF_TRAINING: list[Callable[[TrainingRecord, Guarantee], Risk]] = []


def card_of(guarantee: Guarantee, training: TrainingRecord | None) -> str:
    """Returns the card of a release as Markdown text."""
    known = concrete(guarantee)
    parts = ["# Privacy of this release", _in_words(known), _not_promised(known)]
    if training is not None:
        parts += [_risk(training, known), _table(training, known)]
    return "\n\n".join(parts) + "\n"


def _in_words(known: Guarantee) -> str:
    if math.isinf(known.epsilon) or known.delta >= 1:
        return "**This release has no guarantee.**"
    replaced = known.relation is NeighboringRelation.REPLACE_ONE
    change = "is replaced" if replaced else "is added or removed"
    unit = f"one {known.privacy_unit}"
    if known.group_size > 1:
        unit = f"a group of {known.group_size} ({known.privacy_unit})"
    factor = shown_number(math.exp(min(known.epsilon, 700.0)))
    more = f", plus {shown_number(known.delta)}" if known.delta else ""
    pairs = ""
    if known.gamma:
        share = shown_number(known.gamma)
        pairs = f" For random pairs of databases, this fails with probability {share} at most."
    if known.confidence is not None and known.confidence != 1:
        misled = shown_number(1 - float(known.confidence))
        pairs += (
            f" Random draws found these numbers, and mislead with probability {misled} at most."
        )
    return (
        f"If {unit} {change}, the probability of any set of results becomes at most {factor} times"
        f" as large{more}.{pairs}\n\n`{known!r}`"
    )


def _not_promised(known: Guarantee) -> str:
    lines = [
        "What this does not promise:",
        "- that the release is accurate, fair or useful;",
        "- that nothing can be learned about a person from facts that hold for everybody;",
        f"- anything for several {known.privacy_unit}s of the same person, beyond their sum;",
        "- anything for other releases of the same records: their costs add up;",
        "- secrecy of the program, its parameters and the public number of slots.",
    ]
    if "seeded key" in known.notes:
        lines.insert(1, "- **any privacy: the noise came from a seed, which can be guessed**;")
    return "\n".join(lines)


def _risk(training: TrainingRecord, known: Guarantee) -> str:
    risk = RISK_OF_TRAINING[0](training, known)
    right = _percent((1 + risk.advantage) / 2)
    found = _percent(1 - float(risk.tradeoff(0.01)))
    return (
        "What an attacker can learn who knows all other records:\n"
        f"- whether a given {known.privacy_unit} was used: at most {right} of guesses are right"
        " (50% without the release);\n"
        f"- at most {found} of the members are found, if 1% of the"
        " others are accused;\n"
        f"- a record that a guess finds in 1% of cases is found in at most"
        f" {_percent(risk.reconstruction_bound(0.01))}."
    )


def _percent(share: float) -> str:
    """Returns a fraction as text in percent, rounded up."""
    return f"{math.ceil(1000 * share) / 10:.1f}%"


def _turns(training: TrainingRecord) -> str:
    if training.groups == 1:
        return ""
    if training.sampling == "separated":
        return f" in each batch, if in none of the {training.groups - 1} before it"
    own = "secret bin" if training.sampling == "bins" else "group"
    return f" in the batches of its {own}, one of {training.groups} that take turns"


def _table(training: TrainingRecord, known: Guarantee) -> str:
    rows = {
        "neighbors": f"{known.neighbors}, in {training.slots} public slots",
        "batches": f"{training.sampling}, of {training.batch_size:g} expected records",
        "rate": f"{training.rate:.6g}{_turns(training)}",
        "steps that are paid for": str(training.steps),
        "clip norm": ", ".join(training.clip_norm),
        "noise multiplier": f"{training.noise_multiplier:.6g}",
        "bands of the noise": str(training.strategy),
        "parameters": str(training.parameters),
        "optimizer": f"program {training.optimizer[:12]}",
        "loss": f"program {training.loss[:12]}",
        "versions": ", ".join(f"{name} {version}" for name, version in training.versions),
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["| Training | |", "|---|---|", *lines])

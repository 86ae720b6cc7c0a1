"""Faults of models: exits, packages, training."""

from __future__ import annotations

from .fault import Fault
from .suites import COUNTED, EARLY_EXIT, FILES, PACKAGE

FAULTS = (
    Fault(
        "a prompt's last layer keeps no keys and values",
        "ee_models/decoder.py",
        "self.write_kv(last.attention, hidden, kv, hi - 1, view)",
        "self.write_kv(last.attention, hidden, kv, lo, view)",
        ("tests/laws/test_layers.py",),
    ),
    Fault(
        "the original is compared in rows that were not drawn",
        "ee_models/training/early_exit.py",
        "soft_label_loss(last[here], self.original(rows), head.detach())",
        "soft_label_loss(last[: len(here)], self.original(rows), head.detach())",
        EARLY_EXIT,
    ),
    Fault(
        "exits are not filled by passes in one call",
        "ee_models/exits.py",
        "if first else [last]",
        "if first else []",
        ("tests/laws/test_adapters.py",),
    ),
    Fault(
        "exits with several blocks fill their first one's KV",
        "ee_models/exits.py",
        "last = replace(last, kind=Kind.FILL)",
        "last = replace(last, kind=Kind.FILL, kv_layer=kv_layer)",
        ("tests/ee_models/test_fused_pass.py",),
    ),
    Fault(
        "n-grams: a package keeps them to itself",
        "ee_models/checkpoint/ee_package.py",
        "if (self.folder / NGRAMS_INFO).exists():",
        "if False:",
        COUNTED,
    ),
    Fault(
        "n-grams: a model that learnt given answers guesses from its base's",
        "hispec/loading/ee_packages.py",
        ' or package.about.recipe.get("target") != "self":',
        ":",
        ("tests/loading/test_ee_packages.py",),
    ),
    Fault(
        "n-grams: a package takes those of any model that has some",
        "hispec/loading/ee_packages.py",
        " if file.about.base_model.fingerprint == of_base)",
        " if of_base)",
        ("tests/loading/test_ee_packages.py",),
    ),
    Fault(
        "stop strings are taken from a text that looks for none",
        "hispec/engine/admission.py",
        "if params.stop and text is not None and is_asked_at_end(text):",
        "if False:",
        ("tests/engine/test_held.py",),
    ),
    Fault(
        "all of an exit's gradient reaches the trunk",
        "ee_models/training/early_exit.py",
        "hidden = torch.lerp(hidden.detach(), hidden, share)",
        "",
        EARLY_EXIT,
    ),
    Fault(
        "the last layer learns from its exits",
        "ee_models/training/losses.py",
        "return _CrossEntropy.apply(normed, head, final.detach())",
        "return _CrossEntropy.apply(final, head, normed.detach())",
        EARLY_EXIT,
    ),
    Fault(
        "the original that a model is held to is the model in training",
        "ee_models/training/early_exit.py",
        "        with self.without_lora():\n            found",
        "        if True:\n            found",
        EARLY_EXIT,
    ),
    Fault(
        "micro-batches count alike whatever their size",
        "ee_models/training/early_exit.py",
        "MicroBatch(batch, len(batch.targets) / total, rows)",
        "MicroBatch(batch, 1 / len(batches), rows)",
        EARLY_EXIT,
    ),
    Fault(
        "in training a token attends to the one behind it",
        "ee_models/training/attention.py",
        ".triu(low + 1)",
        ".triu(low + 2)",
        ("tests/training/test_attention.py",),
    ),
    Fault(
        "in training a window is one token wider",
        "ee_models/training/attention.py",
        "ones.tril(-window)",
        "ones.tril(-window - 1)",
        ("tests/training/test_attention.py",),
    ),
    Fault(
        "a slower machine counts as the engine's own work",
        "hispec/profile/predict.py",
        "seconds=step.seconds / float(drift(step.rows + step.prefill_tokens))",
        "seconds=step.seconds",
        ("tests/profile/test_predict.py",),
    ),
    Fault(
        "a package is merged without its scale",
        "ee_models/checkpoint/low_rank.py",
        "self.scale * total",
        "total",
        PACKAGE,
    ),
    Fault(
        "a package is added to whatever model is there",
        "ee_models/checkpoint/ee_package.py",
        "        check_base_model(self.about.base_model, base, what, remedy, PackageError)",
        "        print(what, remedy, check_base_model)",
        PACKAGE,
    ),
    Fault(
        "files: a name that no system takes is looked for",
        "ee_models/checkpoint/weights.py",
        "if not os.path.isfile(path):",
        "if not path.is_file():",
        FILES,
    ),
    Fault(
        "files: a message repeats a whole document",
        "ee_models/errors.py",
        "return cut(repr(value), 100)",
        "return repr(value)",
        FILES,
    ),
)

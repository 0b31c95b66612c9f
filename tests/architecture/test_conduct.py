"""Rules of conduct for library code: it does not read the environment for itself, print, use a shell, or unpickle
unverified data.

True exceptions are listed with their reasons, and must still be needed: a list can only shrink by itself.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest

from tests.architecture.source import ROOT, Module, dotted, everything, functions, imports, library, nodes, parse, texts

READS_ENVIRONMENT = {
    "hvdgloo.config": "the one reader of settings",
    "hvdgloo._backends.gpu": "TORCH_NCCL_ASYNC_ERROR_HANDLING and its like can be told to torch in no other way",
    "hvdgloo._job.environment": "a program finds its place there, which changes while it runs",
    "hvdgloo._job.other_launchers": "torchrun, mpirun and srun say there what they have started, and so must we",
    "hvdgloo._job.participant": "NCCL_SOCKET_IFNAME is NCCL's, which hvdgloo-run sets for its workers, too",
    "hvdgloo.common.util": "env() sets variables for programs, and puts them back",
    "hvdgloo._platform.temporary_variables": "gives torch's C code variables for a moment, and users theirs back",
    "hvdgloo._torch_backend": "every import of torch calls it, so it must not import the settings",
    "hvdgloo.torch.distributed._connection": "MASTER_ADDR and LOCAL_WORLD_SIZE are torch's",
    "hvdgloo.as_horovod.__main__": "the program gets this process's environment",
    "hvdgloo.ray._worker": "where its actor listens was told to this worker alone, and must not reach its children",
    "hvdgloo.spark._bringing": "what a Spark task has in its environment is its worker's, too",
    "hvdgloo.spark.common.backend": "SparkBackend gives workers the driver's environment, as Horovod's does",
    "hvdgloo.spark.keras._library": "KERAS_BACKEND says what Keras computes with, before it is imported",
    "hvdgloo.spark.keras._remote": "CUDA_VISIBLE_DEVICES shows Keras's backend one GPU, before it is imported",
    "hvdgloo.spark.task": "a worker finds there what Spark has given to its task",
    "hvdgloo.spark.common.store": "DATABRICKS_RUNTIME_VERSION is Databricks', which makes DBFS a local folder",
    "hvdgloo.tensorflow._waiting": "TF_NUM_INTEROP_THREADS is TensorFlow's, which does not tell what it makes of it",
    "hvdgloo.run": "workers get this process's environment, and the variables that run(env=...) adds",
    "hvdgloo.runner.inbound.job": "workers get this process's settings",
    "hvdgloo.runner.inbound.task": "workers get the environment of the task that brings their agent",
    "hvdgloo.runner.cli.main": "workers get this process's environment, and the variables that flags and files set",
    "hvdgloo.runner.agent.agent": "CUDA_VISIBLE_DEVICES says how many GPUs the host offers",
    "hvdgloo.runner.transport.local": "a local agent gets the launcher's environment",
    "hvdgloo.runner.transport.select": "srun gets the launcher's environment",
}

PRINTS = {
    "hvdgloo.keras.callbacks": "verbose=1 of the warm-up, beside Keras's own progress",
    "hvdgloo.spark.torch._remote": "verbose=1 of an estimator: a line for each epoch, as Keras has one",
}

UNPICKLES = {
    (
        "hvdgloo._collectives.objects",
        "_unpack",
    ): "unsealed in the same expression; a lone process reads only what it wrote",
    ("hvdgloo.elastic._values", "_copied"): "made by this process, in the same expression",
    ("hvdgloo.runner.worker.function_task", "unpack_outcome"): "unsealed in the same expression",
    ("hvdgloo.runner.worker.function_task", "main"): "unsealed two lines above",
    ("hvdgloo.runner.worker.function_task", "_call"): "part of what main() unsealed",
    (
        "hvdgloo.runner.worker.function_task",
        "_pickled",
    ): "made by this process, to see whether it can be read back",
    ("hvdgloo.spark.keras._remote", "train"): "part of what function_task unsealed, or what a user's backend has sent",
    ("hvdgloo.spark.keras._predictor", "KerasPredictor.load"): "part of what Spark itself has unpickled",
    ("hvdgloo.spark._bringing", "bring"): "it came with the task, which Spark itself has unpickled",
    ("hvdgloo.spark.common._predicting", "_loaded"): "broadcast by Spark, which has unpickled this very function",
    ("hvdgloo.spark.common.serialization", "Codec.decode"): "where load() was not told trusted=False",
    ("hvdgloo.spark.torch._codecs", "OptimizerCodec.decode"): "where load() was not told trusted=False",
    ("hvdgloo.spark.torch._codecs", "_read"): "tensors and plain values only: weights_only=True",
    ("hvdgloo.spark.torch._remote", "_Loop._resume"): "tensors and plain values only: weights_only=True",
    ("hvdgloo.spark.torch.estimator", "TorchEstimator._make_model"): "tensors and plain values: weights_only=True",
    ("hvdgloo.runner.function_results", "conclude"): "part of what unpack_outcome() unsealed",
    ("hvdgloo.runner.function_results", "_unpickled"): "part of what unpack_outcome() unsealed",
    ("hvdgloo.ray._actor", "WorkerActor.call"): "from this actor's worker, by a socket whose ends prove their user",
    ("hvdgloo.ray._actor", "_loaded"): "what a worker has returned, which Ray brings as it brings all objects",
    ("hvdgloo.ray._worker", "_call"): "from this worker's actor, by a socket whose ends prove their user",
}

WRITES_FILES = {
    "hvdgloo._platform.files": "the one place where files are opened for writing",
    "hvdgloo.spark.keras._models": "in a temporary folder that only this user can enter",
}

SIGNS = {
    "hvdgloo._net.proofs": "proofs of the secret, and keys that follow from it",
    "hvdgloo._net.frame_mac": "messages after a handshake",
    "hvdgloo.rendezvous._auth": "requests, answers, tokens and seals",
}

_ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
_UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "_pickle"}
_UNPICKLING = {"load", "loads", "Unpickler", "open"}
_SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "eval", "exec"}


def reads_environment(module: Module) -> list[int]:
    attributes = [
        node.lineno for node in nodes(module.tree) if isinstance(node, ast.Attribute) and dotted(node) in _ENVIRONMENT
    ]
    names = [
        node.lineno
        for node in nodes(module.tree)
        if isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and any(f"os.{alias.name}" in _ENVIRONMENT for alias in node.names)
    ]
    return attributes + names


def prints(module: Module) -> list[int]:
    return [node.lineno for node in _calls(module.tree) if dotted(node.func) in {"print", "builtins.print"}]


def runs_text(module: Module) -> list[int]:
    """Calls that hand a text to a shell or to Python."""
    return [
        node.lineno
        for node in _calls(module.tree)
        if dotted(node.func) in _SHELLS
        or any(
            keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
            for keyword in node.keywords
        )
    ]


def raises_foreign(module: Module) -> list[int]:
    """Find places where a program that catches RuntimeError, as Horovod's do, would miss an error.

    What a class or a call can never be is Python's to say: TypeError, AttributeError, and a method that a subclass has
    to define.
    """
    raised = [node for node in nodes(module.tree) if isinstance(node, ast.Raise) and node.exc is not None]
    names = {id(node): dotted(node.exc.func if isinstance(node.exc, ast.Call) else node.exc) for node in raised}
    return [node.lineno for node in raised if names[id(node)] in _NOT_OURS]


def makes_tensors_of_any_kind(module: Module) -> list[int]:
    """Calls that make a tensor where the program's default device says, or of its default type.

    Both are the program's settings: what it trains on a GPU is no memory for the engine.
    """
    return [
        call.lineno
        for call in _calls(module.tree)
        if (needed := _TENSOR_MAKERS.get(_of_torch(call)))
        and not {*needed} <= {keyword.arg for keyword in call.keywords}
    ]


def _of_torch(call: ast.Call) -> str:
    """The name of a function of torch's that is called; of another module's an empty one."""
    owner, _, name = dotted(call.func).rpartition(".")
    return name if owner.rpartition(".")[2].strip("_") == "torch" else ""


_TENSOR_MAKERS = {
    **dict.fromkeys(
        (
            *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
            *("logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "sparse_compressed_tensor"),
            *("sparse_coo_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
        ),
        ("device", "dtype"),
    ),
    "Generator": ("device",),
    "Tensor": ("device", "dtype"),  # has neither: torch.Tensor(3) is always of the program's kind
    "FloatTensor": ("device", "dtype"),
}
"""Functions of torch's to the arguments without which the program's settings decide."""


def takes_addresses(module: Module) -> set[str]:
    """Functions that ask a tensor of torch's where it lies."""
    return {
        name
        for name, function in functions(module.tree)
        for call in _calls(function)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "data_ptr"
    }


TAKES_ADDRESSES = {
    ("hvdgloo._backends.cuda", "DeviceMemory.empty"): "of a GPU, two lines above",
    ("hvdgloo._backends.cuda", "PinnedMemory.empty"): "of the host, three lines above",
    ("hvdgloo._backends.gpu", "view"): "a place in a bucket of ours",
    ("hvdgloo.torch._adapter", "TorchAdapter.allocate"): "made on the CPU, three lines above",
    ("hvdgloo.torch._adapter", "TorchAdapter.export"): "behind refusal() or is_null()",
    ("hvdgloo.torch._buckets", "Buckets.adopt"): "compared, to see whether a part was moved",
    ("hvdgloo.torch._buckets", "GradientBucket.address"): "of a bucket of ours",
    ("hvdgloo.torch._memory", "has_no_address"): "looked at for that",
    ("hvdgloo.torch.distributed._transfers", "Transfers._exchange"): "compared",
    ("hvdgloo.torch.distributed._reductions", "Reductions.allreduce"): "behind check(), on the CPU",
    ("hvdgloo.torch.distributed._tensors", "check"): "looked at for that",
    ("hvdgloo.torch.distributed._tensors", "content"): "of what source(), target() or inout() gave, behind check()",
    ("hvdgloo.torch.distributed._tensors", "numbers"): "of what source(), target() or inout() gave, behind check()",
    ("hvdgloo.torch.elastic._copies", "_place"): "compared",
    ("hvdgloo.torch.elastic._steps", "written"): "compared",
    ("hvdgloo.torch.elastic.state", "_stepped_parameters"): "compared",
}


_NOT_OURS = {
    "AssertionError",
    "Exception",
    "ImportError",
    "IndexError",
    "KeyError",
    "LookupError",
    "OSError",
    "TimeoutError",
    "ValueError",
}


def unpickles(module: Module) -> set[str]:
    """Functions that unpickle; ``<module>`` for what is outside of them."""
    inside: dict[int, str] = {}
    for name, function in functions(module.tree):
        for call in _calls(function):
            inside[id(call)] = name  # inner functions come later, and win
    return {inside.get(id(call), "<module>") for call in _calls(module.tree) if _unpickling(call)}


def _unpickling(call: ast.Call) -> bool:
    if any(k.arg in {"allow_pickle", "weights_only"} for k in call.keywords):
        return True
    owner, _, name = dotted(call.func).rpartition(".")
    return (owner in _UNPICKLERS and name in _UNPICKLING) or dotted(call.func) == "torch.load"


def writes_files(module: Module) -> list[int]:
    """Calls that open a file for writing by its name; ``/dev/null`` is none, and a temporary file has no known name."""
    return [node.lineno for node in _calls(module.tree) if _writing(node)]


def _writing(call: ast.Call) -> bool:
    called = dotted(call.func)
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg in {"mode", "flags"})]
    if called == "os.mkfifo" or called.startswith("shutil.copy") or called == "shutil.move":
        return True
    if not given or dotted(given[0]) == "os.devnull":
        return False
    if called == "os.open":
        return not {dotted(node) for node in ast.walk(call)}.isdisjoint(_WRITING_FLAGS)
    if called in {"open", "io.open"}:
        mode = given[1] if len(given) > 1 else ast.Constant("r")
        # What is not known is taken for writing.
        return not isinstance(mode, ast.Constant) or not set(str(mode.value)).isdisjoint("wax+")
    # A path's methods; a store's, which are called the same, take the path as well.
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return method in {"write_text", "write_bytes"} and len(call.args) == 1


_WRITING_FLAGS = {"os.O_WRONLY", "os.O_RDWR", "os.O_CREAT"}


def _calls(tree: ast.AST) -> Iterable[ast.Call]:
    inside = nodes(tree) if isinstance(tree, ast.Module) else ast.walk(tree)
    return (node for node in inside if isinstance(node, ast.Call))


def _places(rule: Callable[[Module], list[int]], exceptions: Iterable[str] = ()) -> list[str]:
    return [
        f"{module.place}:{line}"
        for module in library().values()
        if module.name not in exceptions
        for line in rule(module)
    ]


def test_only_config_reads_the_environment() -> None:
    assert _places(reads_environment, READS_ENVIRONMENT) == []


def test_no_file_is_opened_for_writing_but_by_the_functions_that_follow_no_other_user_s_links() -> None:
    assert _places(writes_files, WRITES_FILES) == []


def test_exceptions_about_files_are_still_needed() -> None:
    assert [name for name in WRITES_FILES if not writes_files(library()[name])] == []


def test_exceptions_about_the_environment_are_still_needed() -> None:
    assert [name for name in READS_ENVIRONMENT if not reads_environment(library()[name])] == []


def test_library_code_does_not_print() -> None:
    assert _places(prints, PRINTS) == []


def test_front_ends_raise_runtime_errors() -> None:
    """Every error that a program meets is one of ``hvdgloo.errors``, and so a RuntimeError."""
    known = ("_collectives", "_training", "common", "keras", "mxnet", "numpy", "tensorflow", "torch")
    found = [
        f"{module.place}:{line}"
        for module in library().values()
        if module.name.startswith(tuple(f"hvdgloo.{part}" for part in known))
        for line in raises_foreign(module)
    ]
    assert found == []


def test_no_tensor_is_made_where_or_of_what_type_the_program_says() -> None:
    assert _places(makes_tensors_of_any_kind) == []


def test_addresses_of_tensors_are_taken_where_their_device_was_checked_and_nowhere_else() -> None:
    assert {(m.name, function) for m in library().values() for function in takes_addresses(m)} == set(TAKES_ADDRESSES)


def test_no_shell_sees_any_text() -> None:
    assert _places(runs_text) == []


def test_pickles_are_read_where_their_seal_was_checked_and_nowhere_else() -> None:
    """Pain 30: nothing is unpickled before its HMAC was checked."""
    found = {(module.name, function) for module in library().values() for function in unpickles(module)}
    assert found == set(UNPICKLES)


def test_signatures_are_made_and_compared_in_few_places() -> None:
    """Pain 30: an auditor need not look anywhere else."""
    assert {module.name for module in library().values() if any(i.target == "hmac" for i in imports(module))} == set(
        SIGNS
    )


def test_the_rendezvous_and_the_engine_know_no_pickle() -> None:
    """Pain 30: what listens on the network never unpickles, not even what is signed."""
    wires = (
        "hvdgloo.rendezvous",
        "hvdgloo._engine",
        "hvdgloo._backends",
        "hvdgloo.runner.protocol.frames",
        "hvdgloo.runner.agent",
    )
    assert [
        f"{module.place}:{entry.line}"
        for module in library().values()
        if module.name.startswith(wires)
        for entry in imports(module)
        if entry.target.partition(".")[0] in _UNPICKLERS
    ] == []


# Spelled so that this file does not contain what it looks for.
_MACHINE_PATH = re.compile(
    r"(?<![\w.<>{}\-/])/(" + "|".join(["ro" + "ot", "wo" + "rk", "ho" + r"me/\w+"]) + r")(?![\w-])"
)


def machine_paths(text: str) -> list[str]:
    return [match.group() for match in _MACHINE_PATH.finditer(text)]


def test_no_file_names_a_path_of_a_developer_s_machine() -> None:
    found = [f"{path.relative_to(ROOT)}: {hit}" for path, text in texts() for hit in machine_paths(text)]
    assert found == []


def test_all_text_ends_lines_with_a_newline_alone() -> None:
    assert [str(path.relative_to(ROOT)) for path, text in texts() if "\r\n" in text] == []


@pytest.mark.parametrize(
    "text",
    [
        "import os\nx = os.environ['A']",
        "import os\ndef f():\n    return os.getenv('A')",
        "from os import environ",
    ],
)
def test_the_rule_about_the_environment_can_be_broken(text: str) -> None:
    assert len(reads_environment(parse("hvdgloo.x", text))) == 1


@pytest.mark.parametrize(
    "text", ["import os\nos.system('ls')", "import subprocess\nsubprocess.run('ls', shell=True)", "exec('1')"]
)
def test_the_rule_about_shells_can_be_broken(text: str) -> None:
    assert len(runs_text(parse("hvdgloo.x", text))) == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("open(x, 'w')", 1),
        ("open(x, mode='ab', buffering=0)", 1),
        ("open(x, mode)", 1),
        ("open(x, 'r+')\nopen(x, 'xb')", 2),
        ("os.open(x, os.O_WRONLY | os.O_CREAT, 0o600)\nos.open(x, flags=os.O_RDWR)", 2),
        ("Path(x).write_text('y')\npath.write_bytes(data)\nshutil.copyfile(x, y)", 3),
        ("open(x)\nopen(x, 'rb')\nopen(x, encoding='ascii')\nopen(os.devnull, 'w')", 0),
        ("os.open(x, os.O_RDONLY)\nos.open(os.devnull, os.O_RDWR)\nstore.write_text(path, text)", 0),
    ],
)
def test_the_rule_about_files_can_be_broken(text: str, count: int) -> None:
    assert len(writes_files(parse("hvdgloo.x", text))) == count


def test_the_rule_about_errors_can_be_broken() -> None:
    text = "def f():\n    raise ValueError('x')\ndef g():\n    raise KeyError\nraise TypeError('x')\nraise"
    assert raises_foreign(parse("hvdgloo.torch.x", text)) == [2, 4]


def test_the_rule_about_print_can_be_broken() -> None:
    assert prints(parse("hvdgloo.x", "def f():\n    print(1)\n# print(2)\nblueprint(3)")) == [2]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("import pickle\nclass A:\n    def f(self):\n        return pickle.loads(b'')", "A.f"),
        ("import cloudpickle\ndef f():\n    def g():\n        cloudpickle.load(x)", "f.g"),
        ("import numpy\nx = numpy.load(y, allow_pickle=True)", "<module>"),
        ("import torch\ndef f():\n    torch.load(x)", "f"),
    ],
)
def test_the_rule_about_pickles_can_be_broken(text: str, where: str) -> None:
    assert unpickles(parse("hvdgloo.x", text)) == {where}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import torch\nx = torch.empty(3, dtype=d)", [2]),
        ("import torch\nx = torch.empty(3, device=d)", [2]),
        ("import torch\nx = torch.zeros(3, device=d, dtype=e)", []),
        ("x = self._torch.tensor(3)", [1]),
        ("x = torch.FloatTensor(3)", [1]),
        ("x = numpy.empty(3), torch.empty_like(y)", []),
    ],
)
def test_the_rule_about_tensors_can_be_broken(text: str, lines: list[int]) -> None:
    assert makes_tensors_of_any_kind(parse("hvdgloo.x", text)) == lines


@pytest.mark.parametrize("name", ["ro" + "ot", "wo" + "rk", "ho" + "me/ann"])
def test_the_rule_about_machine_paths_can_be_broken(name: str) -> None:
    assert machine_paths(f"see /{name}/project and 'x=/{name}'") == [f"/{name}", f"/{name}"]
    assert machine_paths(f"/v1/{name}ers <epoch>/{name}ers a/{name}") == []


def test_all_our_own_python_is_looked_at() -> None:
    names = {module.name for module in everything()}
    assert {"tests.architecture.test_conduct", "examples.torch_digits", "hvdgloo.config"} <= names


# What tests compare.

_SENTENCE = 30
"""Characters from which on a piece of a message is a sentence, and not a name or a fact in it."""


def sentences(modules: Iterable[Module]) -> set[str]:
    """Pieces of the library's messages that are always the same: lines of strings, and what stands between fields."""
    return {
        line.strip()
        for module in modules
        for text in _literals(module)
        for line in text.splitlines()
        if len(line.strip()) >= _SENTENCE and line.strip().count(" ") >= 2
    }


def compared(said: set[str], modules: Iterable[Module]) -> dict[str, set[str]]:
    """The modules that have each sentence in a string, if any has; a regular expression's backslashes are ignored."""
    texts = {module.place: "\0".join(_literals(module)).replace("\\", "") for module in modules}
    together = "\0".join(texts.values())
    return {
        sentence: {place for place, text in texts.items() if sentence in text}
        for sentence in said
        if sentence in together
    }


def _literals(module: Module) -> list[str]:
    """All strings of a module but for docstrings and other strings that are not used."""
    unused = {id(node.value) for node in nodes(module.tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in nodes(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unused
    ]


def test_each_message_is_compared_word_for_word_in_one_place() -> None:
    """Rewording a message changes one test; other tests look for the facts in it."""
    tests = [module for module in everything() if module.name.startswith("tests.")]
    found = compared(sentences(library().values()), tests)
    assert len(found) > 50
    assert {sentence: places for sentence, places in found.items() if len(places) > 1} == {}


def test_a_message_that_two_modules_compare_is_found() -> None:
    text = "no rank has ever seen anything like it"
    said = sentences([parse("hvdgloo.x", f"raise ValueError(f'{{x}}: {text}\\n{{y}}')")])
    assert said == {f": {text}"}
    one = parse("tests.one", f"assert 'oh: {text}' in x")
    other = Module("tests.other", ROOT / "other.py", f"match(r'{{1}}: {text}')")
    assert compared(said, [one]) == {f": {text}": {one.place}}
    assert compared(said, [one, other]) == {f": {text}": {one.place, other.place}}


_OF_GPUS = frozenset(
    [
        "is_cuda",
        "is_pinned",
        "pin_memory",
        "record_event",
        "record_stream",
        "wait_event",
        "wait_stream",
        "ProcessGroupNCCL",
    ]
)


def concerns_gpus(module: Module) -> list[int]:
    """Attributes, arguments and imports by which a program reaches a GPU's streams, events, memory and collectives."""
    attributes = [
        node.lineno
        for node in nodes(module.tree)
        if isinstance(node, ast.Attribute) and (dotted(node) == "torch.cuda" or node.attr in _OF_GPUS)
    ]
    arguments = [
        node.value.lineno
        for node in nodes(module.tree)
        if isinstance(node, ast.keyword) and node.arg in {"pin_memory", "non_blocking"}
    ]
    imported = [found.line for found in imports(module) if found.target.split(".")[:2] == ["torch", "cuda"]]
    return attributes + arguments + imported


def test_one_module_owns_every_call_that_concerns_a_gpu() -> None:
    assert _places(concerns_gpus, ["hvdgloo._backends.gpu"]) == []


def test_calls_that_concern_a_gpu_are_noticed() -> None:
    text = """
    torch.cuda.current_stream(device).synchronize()
    from torch.cuda import Stream
    import torch.cuda.nccl
    tensor.to(device, non_blocking=True)
    tensor.record_stream(stream)
    import torch, torch.distributed
    torch.accelerator
    """
    module = parse("hvdgloo.x", textwrap.dedent(text))
    assert sorted(concerns_gpus(module)) == [2, 3, 4, 5, 6]


def continues_an_error(module: Module) -> list[int]:
    """Messages that put an error's text, which may end in a mark of its own, before a mark of ours.

    That gives "is its host overloaded?. Trying again"; ``spelling.followed_by`` puts the two together.
    """
    found = set()
    for handler in nodes(module.tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        for node in ast.walk(handler):
            if any(_is_text_of(part, handler.name) and _begins_with_mark(after) for part, after in _followed(node)):
                found.add(node.lineno)
    return sorted(found)


def _followed(node: ast.AST) -> Iterable[tuple[ast.expr, str]]:
    """Yield the expressions in an f-string, or in a message with %, each with the text after it."""
    if isinstance(node, ast.JoinedStr):
        for field, after in pairwise(node.values):
            if isinstance(field, ast.FormattedValue) and isinstance(after, ast.Constant):
                yield field.value, str(after.value)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        yield from zip(node.args[1:], re.split(r"%[-\d.]*[a-z]", str(node.args[0].value))[1:], strict=False)


def _is_text_of(value: ast.expr, error: str) -> bool:
    if isinstance(value, ast.BoolOp):
        return any(_is_text_of(part, error) for part in value.values)
    if isinstance(value, ast.Call) and dotted(value.func) in {"str", "_reason"}:
        value = value.args[0]
    return isinstance(value, ast.Name) and value.id == error


def _begins_with_mark(text: str) -> bool:
    return re.match(r"[.;?!]\s", text) is not None


def test_no_mark_of_ours_follows_one_of_an_error() -> None:
    assert _places(continues_an_error) == []


def test_a_mark_that_follows_an_errors_is_found() -> None:
    text = """
    try:
        f()
    except OSError as error:
        log("%s: %s. Trying again", name, error)
        log("%s. Trying %s", name, error)
        g(f"{name}; {error or 'lost'}; look there")
        g(f"{name}; {error.strerror}; look there ({error}); and there: {error}")
    """
    assert continues_an_error(parse("hvdgloo.x", textwrap.dedent(text))) == [5, 7]

"""Names, order of parameters and defaults that programs written for Horovod rely on, module by module.

The texts below are what such a program may write, by position or by name. Parameters may be added behind them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from typing import Any

import pytest

from hvdgloo._collectives.compression import NoneCompressor
from hvdgloo._collectives.process_sets import global_process_set
from hvdgloo.types import ReduceOp
from tests.support.frameworks import need
from tests.support.launching import run_command

REDUCTION = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=all"
REDUCED = (
    "average=None, name=None, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=all"
)
SCATTERING = "name=None, op=Average, process_set=all, prescale_factor=1.0, postscale_factor=1.0"
SCATTERED = "name=None, compression=none, op=Average, process_set=all, prescale_factor=1.0, postscale_factor=1.0"

EVERY_FRONT_END = {
    "init": "comm=None, process_sets=None",
    **dict.fromkeys(
        [
            "shutdown",
            "is_initialized",
            *("size", "rank", "local_size", "local_rank", "cross_size", "cross_rank", "is_homogeneous"),
            *("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built"),
            *("ddl_built", "ccl_built", "cuda_built", "rocm_built", "stop_timeline"),
        ],
        "",
    ),
    "start_timeline": "file_path, mark_cycles=False",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "allreduce": f"tensor, {REDUCED}",
    "allreduce_async": f"tensor, {REDUCTION}",
    "allreduce_": f"tensor, {REDUCTION}",
    "allreduce_async_": f"tensor, {REDUCTION}",
    "grouped_allreduce": f"tensors, {REDUCED}",
    "grouped_allreduce_async": f"tensors, {REDUCTION}",
    "grouped_allreduce_": f"tensors, {REDUCTION}",
    "grouped_allreduce_async_": f"tensors, {REDUCTION}",
    "allgather": "tensor, name=None, process_set=all",
    "allgather_async": "tensor, name=None, process_set=all",
    "grouped_allgather": "tensors, name=None, process_set=all",
    "grouped_allgather_async": "tensors, name=None, process_set=all",
    **dict.fromkeys(
        ["broadcast", "broadcast_async", "broadcast_", "broadcast_async_"],
        "tensor, root_rank, name=None, process_set=all",
    ),
    "alltoall": "tensor, splits=None, name=None, process_set=all",
    "alltoall_async": "tensor, splits=None, name=None, process_set=all",
    "reducescatter": f"tensor, {SCATTERED}",
    "reducescatter_async": f"tensor, {SCATTERING}",
    "grouped_reducescatter": f"tensors, {SCATTERED}",
    "grouped_reducescatter_async": f"tensors, {SCATTERING}",
    "join": "device=-1",
    "barrier": "process_set=all",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=all",
    "allgather_object": "obj, name=None",
}
TORCH = {
    "sparse_allreduce_async": "tensor, name, op, process_set=all",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=Average, "
        "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=all"
    ),
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
}
MORE = {
    "hvdgloo.torch.elastic": {
        "run": "func",
        "TorchState": "model=None, optimizer=None",
        "ElasticSampler": "dataset, shuffle=True, seed=0",
    },
    "hvdgloo.torch.elastic.sampler": {"ElasticSampler": "dataset, shuffle=True, seed=0"},
    "hvdgloo.torch.elastic.state": {
        "TorchState": "model=None, optimizer=None",
        "StateHandler": "value",
        "ModelStateHandler": "model",
        "OptimizerStateHandler": "optimizer",
        "SamplerStateHandler": "sampler",
        "get_handler_registry": "",
        "set_handler_registry": "registry",
    },
    "hvdgloo.common.elastic": {
        "State": "bcast_object, get_rank",
        "ObjectState": "bcast_object, get_rank, **kwargs",
        "run_fn": "func, reset",
    },
    "hvdgloo.torch.mpi_ops": {"handle_average_backwards_compatibility": "op, average"},
    "hvdgloo.common.exceptions": {
        "HorovodInternalError": None,
        "HostsUpdatedInterrupt": "skip_sync",
        "HorovodVersionMismatchError": "name, version, installed_version",
        "get_version_mismatch_message": "name, version, installed_version",
    },
    "hvdgloo.common.process_sets": {
        "ProcessSet": "ranks_or_comm",
        "add_process_set": "process_set",
        "remove_process_set": "process_set",
    },
    "hvdgloo.runner.elastic.constants": {"RESET_LIMIT_EXCEEDED_MESSAGE": None},
    "hvdgloo.runner.elastic.discovery": {
        "FixedHosts": "host_slots",
        "HostDiscovery": None,
        "HostDiscoveryScript": "discovery_script, slots",
        "HostManager": "discovery",
        "HostState": "cooldown_range=None",
    },
    "hvdgloo.runner.elastic.settings": {
        "ElasticSettings": (
            "discovery, min_num_proc, max_num_proc, elastic_timeout, reset_limit, cooldown_range=None, **settings"
        ),
    },
    "hvdgloo.runner.elastic.worker": {"HostUpdateResult": None},
    "hvdgloo.common.util": {
        "extension_available": "ext_base_name, verbose=False",
        "check_extension": "ext_name, ext_env_var, pkg_path, *args",
        "gpu_available": "ext_base_name, verbose=False",
        **dict.fromkeys(["mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built"], "verbose=False"),
        "env": "**kwargs",
        "num_rank_is_power_2": "num_rank",
        "split_list": "l, n",
        "get_average_backwards_compatibility_fun": "reduce_ops",
        "is_iterable": "x",
        "is_version_greater_equal_than": "ver, target",
    },
}

DENSE = "average=None, device_dense='', device_sparse='', compression=none, op=None"
FACTORS = "prescale_factor=1.0, postscale_factor=1.0"
TAPE = (
    "gradtape, device_dense='', device_sparse='', compression=none, sparse_as_dense=False, op=Average, "
    "gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set=all"
)
BASIC = {
    name: EVERY_FRONT_END[name]
    for name in EVERY_FRONT_END
    if not name.endswith(("_async", "_", "_async_"))
    and name not in ("allgather", "allreduce", "alltoall", "broadcast", "reducescatter", "poll", "synchronize", "join")
    and not name.startswith("grouped_")
}
TENSORFLOW = {
    **{name: BASIC[name] for name in BASIC if "object" not in name},
    "allreduce": f"tensor, {DENSE}, {FACTORS}, name=None, process_set=all, ignore_name_scope=False",
    "grouped_allreduce": f"tensors, {DENSE}, {FACTORS}, process_set=all, ignore_name_scope=False, name=None",
    "allgather": "tensor, name=None, ignore_name_scope=False, process_set=all",
    "grouped_allgather": "tensors, name=None, ignore_name_scope=False, process_set=all",
    "broadcast": "tensor, root_rank, name=None, ignore_name_scope=False, process_set=all",
    "broadcast_": "variables, root_rank, name=None, process_set=all",
    "alltoall": "tensor, splits=None, name=None, ignore_name_scope=False, process_set=all",
    "reducescatter": (
        "tensor, device_dense='', compression=none, op=Average, name=None, process_set=all, ignore_name_scope=False, "
        f"{FACTORS}"
    ),
    "grouped_reducescatter": f"tensors, device_dense='', compression=none, op=Average, process_set=all, {FACTORS}",
    "broadcast_variables": "variables, root_rank, process_set=all, inplace=False",
    "broadcast_global_variables": "root_rank",
    "BroadcastGlobalVariablesHook": "root_rank, device=''",
    "broadcast_object": "obj, root_rank=0, session=None, name=None, process_set=all",
    "broadcast_object_fn": "root_rank=0, session=None, name=None, process_set=all",
    "allgather_object": "obj, session=None, name=None, process_set=all",
    "DistributedOptimizer": (
        "optimizer, name=None, use_locking=False, device_dense='', device_sparse='', compression=none, "
        "sparse_as_dense=False, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, "
        "average_aggregated_gradients=False, num_groups=0, groups=None, process_set=all, scale_local_gradients=True"
    ),
    "DistributedGradientTape": f"{TAPE}, scale_local_gradients=True",
    "PartialDistributedGradientTape": f"{TAPE}, local_layers=None, scale_local_gradients=True",
    "join": "",
    "rank_op": "name=None",
    "local_rank_op": "name=None",
    "size_op": "process_set_id=0, name=None",
    "local_size_op": "name=None",
    "process_set_included_op": "process_set_id=0, name=None",
    "SyncBatchNormalization": "fused=False",
}
KERAS = {
    **{name: BASIC[name] for name in BASIC if "object" not in name and name != "barrier"},
    "DistributedOptimizer": (
        "optimizer, name=None, device_dense='', device_sparse='', compression=none, sparse_as_dense=False, "
        "gradient_predivide_factor=1.0, op=Average, num_groups=0, groups=None"
    ),
    "broadcast_global_variables": "root_rank",
    "allreduce": "value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None, compression=none",
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=Average",
    "load_model": "filepath, custom_optimizers=None, custom_objects=None, compression=none, legacy_opts=False",
}
TF_KERAS = KERAS | {
    "DistributedOptimizer": (
        "optimizer, name=None, device_dense='', device_sparse='', compression=none, sparse_as_dense=False, "
        "gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, average_aggregated_gradients=False, "
        "num_groups=0, groups=None, process_set=all, scale_local_gradients=True"
    ),
}
CALLBACKS = {
    "BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "MetricAverageCallback": "device=''",
    "LearningRateScheduleCallback": (
        "initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True, "
        "steps_per_epoch=None"
    ),
    "LearningRateWarmupCallback": (
        "initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0"
    ),
    "BestModelCheckpoint": "monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', save_freq='epoch'",
}
KERAS_ELASTIC = {
    "run": "func",
    "KerasState": "model, optimizer=None, **kwargs",
    "CommitStateCallback": "state, batches_per_commit=1",
    "UpdateBatchStateCallback": "state",
    "UpdateEpochStateCallback": "state",
}
REDUCING = "average=None, name=None, priority=0, prescale_factor=1.0, postscale_factor=1.0, process_set=all, op=None"
PLAIN = "name=None, priority=0, process_set=all"
SCATTERING_HERE = "op=Average, name=None, priority=0, process_set=all, prescale_factor=1.0, postscale_factor=1.0"
MXNET = {
    **EVERY_FRONT_END,
    **dict.fromkeys(["allreduce", "allreduce_"], f"tensor, {REDUCING}"),
    **dict.fromkeys(["grouped_allreduce", "grouped_allreduce_"], f"tensors, {REDUCING}"),
    "allgather": f"tensor, {PLAIN}",
    "grouped_allgather": f"tensors, {PLAIN}",
    **dict.fromkeys(["broadcast", "broadcast_"], f"tensor, root_rank, {PLAIN}"),
    "alltoall": f"tensor, splits=None, {PLAIN}",
    "reducescatter": f"tensor, {SCATTERING_HERE}",
    "grouped_reducescatter": f"tensors, {SCATTERING_HERE}",
    "broadcast_parameters": "params, root_rank=0, prefix=None",
    "DistributedOptimizer": "optimizer, gradient_predivide_factor=1.0, num_groups=0, process_set=all",
    "DistributedTrainer": (
        "params, optimizer, optimizer_params=None, compression=none, gradient_predivide_factor=1.0, prefix=None, "
        "num_groups=0, process_set=all"
    ),
}
MORE |= {
    "hvdgloo.mxnet": MXNET,
    "hvdgloo.mxnet.functions": {name: MXNET[name] for name in ("broadcast_object", "broadcast_parameters")},
    "hvdgloo.mxnet.mpi_ops": {name: MXNET[name] for name in ("allreduce", "allgather", "broadcast_", "init", "rank")},
    "hvdgloo.tensorflow": TENSORFLOW | {"_executing_eagerly": ""},
    "hvdgloo.tensorflow.util": {
        "check_num_rank_power_of_2": "num_rank",
        "vars_to_refs": "vars",
        "refs_to_vars": "refs",
        "_executing_eagerly": "",
    },
    "hvdgloo.tensorflow.gradient_aggregation": {
        "LocalGradientAggregationHelper": "backward_passes_per_step, allreduce_func",
    },
    "hvdgloo.tensorflow.gradient_aggregation_eager": {
        "LocalGradientAggregationHelperEager": "backward_passes_per_step, allreduce_func",
    },
    "hvdgloo.tensorflow._optimizer": {
        "_make_allreduce_grads_fn": (
            "name, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, groups"
        ),
    },
    "hvdgloo.tensorflow.data.compute_service": {
        "TfDataServiceConfig": ("dispatchers, workers_per_dispatcher, dispatcher_side, addresses, key, timeout=60"),
        "tf_data_service": "compute_config, rank",
        "send_to_data_service": (
            "dataset, compute_config, rank, size=None, processing_mode='distributed_epoch', reuse_dataset=False, "
            "round_robin=False"
        ),
        "compute_worker_fn": "compute_config",
    },
    "hvdgloo.tensorflow.data.compute_worker": {"main": "dispatchers, dispatcher_side, configfile, timeout"},
    "hvdgloo.keras": KERAS | {"PartialDistributedOptimizer": KERAS["DistributedOptimizer"]},
    "hvdgloo.tensorflow.keras": TF_KERAS,
    "hvdgloo.tensorflow.elastic": {
        "run": "func",
        "TensorFlowState": "variables=None, session=None, **kwargs",
        "TensorFlowKerasState": "model, optimizer=None, backend=None, **kwargs",
    },
    "hvdgloo.keras.callbacks": CALLBACKS,
    "hvdgloo.tensorflow.keras.callbacks": CALLBACKS,
    "hvdgloo.keras.elastic": KERAS_ELASTIC,
    "hvdgloo.tensorflow.keras.elastic": KERAS_ELASTIC,
}

SURFACE = {"hvdgloo.numpy": EVERY_FRONT_END, "hvdgloo.torch": EVERY_FRONT_END | TORCH, **MORE}
CASES = [
    (module, name, parameters)
    for module, names in SURFACE.items()
    for name, parameters in names.items()
    # TensorFlow (with Keras) and MXNet have environments of their own, where these cases run.
    if parameters is not None
    and (importlib.util.find_spec("tensorflow") or not re.search("tensorflow|keras", module))
    and (importlib.util.find_spec("mxnet") or "mxnet" not in module)
]


def written(function: Any, like: str) -> str:
    """A function's parameters, as far as ``like`` goes; a default shows only where ``like`` has one."""
    expected = [part.strip() for part in like.split(",") if part]
    shown = []
    for part, parameter in zip(expected, inspect.signature(function).parameters.values(), strict=False):
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = star + parameter.name
        if "=" in part and parameter.default is not parameter.empty:
            text += f"={_default(parameter.default)}"
        if parameter.kind is parameter.KEYWORD_ONLY:
            text += " by name alone"
        shown.append(text)
    return ", ".join(shown)


def _default(value: Any) -> str:
    if value is NoneCompressor:
        return "none"
    if value is global_process_set:
        return "all"
    return value.name.capitalize() if isinstance(value, ReduceOp) else repr(value)


def _need(module: str) -> None:
    for framework in ("torch", "tensorflow", "keras", "mxnet"):
        if framework in module:
            need(framework)


@pytest.mark.parametrize(("module", "name", "parameters"), CASES)
def test_parameters_and_defaults(module: str, name: str, parameters: str) -> None:
    _need(module)
    assert written(getattr(importlib.import_module(module), name), parameters) == parameters


@pytest.mark.parametrize(("module", "name", "parameters"), CASES)
def test_what_was_not_needed_is_not_needed_now(module: str, name: str, parameters: str) -> None:
    _need(module)
    count = len([part for part in parameters.split(",") if part])
    added = list(inspect.signature(getattr(importlib.import_module(module), name)).parameters.values())[count:]
    assert [p.name for p in added if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)] == []


def test_a_wrong_order_or_default_would_be_noticed() -> None:
    def function(tensor: Any, op: Any = None, name: str = "x") -> None: ...

    assert written(function, "tensor, name=None, op=None") == "tensor, op=None, name='x'"
    assert written(function, "tensor, op, name=None") == "tensor, op, name='x'"
    assert written(function, "tensor, op=None") == "tensor, op=None"


def test_submodules_need_no_import_of_their_own() -> None:
    """Programs write ``hvd.elastic.ElasticSampler`` after ``import horovod.torch as hvd``."""
    pytest.importorskip("torch")
    submodules = ["compression", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm"]
    program = f"import hvdgloo.torch as hvd; print([name for name in {submodules} if not hasattr(hvd, name)])"
    done = run_command([sys.executable, "-c", program], timeout=50, check=True)
    assert done.stdout == "[]\n"


def test_everything_of_the_front_end_is_also_in_the_module_where_horovod_has_it() -> None:
    pytest.importorskip("torch")
    hvd = importlib.import_module("hvdgloo.torch")
    homes = {
        "hvdgloo.torch.mpi_ops": set(EVERY_FRONT_END) - {"ProcessSet", "broadcast_object", "allgather_object"},
        "hvdgloo.torch.functions": {
            "allgather_object",
            "broadcast_object",
            "broadcast_optimizer_state",
            "broadcast_parameters",
        },
        "hvdgloo.torch.optimizer": {"DistributedOptimizer"},
        "hvdgloo.torch.sync_batch_norm": {"SyncBatchNorm"},
        "hvdgloo.torch.compression": {"Compression"},
        "hvdgloo.common.process_sets": {"ProcessSet", "global_process_set"},
        "hvdgloo.common.exceptions": {"HorovodInternalError"},
    }
    for home, names in homes.items():
        module = importlib.import_module(home)
        assert [name for name in names if getattr(module, name, None) != getattr(hvd, name)] == [], home

"""Collectives of a process group that move elements and combine none."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from hvdgloo._backends.shm.calls import Call
from hvdgloo._backends.shm.segment import array_at
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch.distributed import _tensors
from hvdgloo.torch.distributed._calls import FINISHED, Defaults, GroupCalls, Options
from hvdgloo.torch.distributed._tensors import Finish


class Transfers(GroupCalls):
    """Collectives that give ranks each other's elements."""

    def broadcast(self, tensors: Any, opts: Options = None, timeout: timedelta | None = None) -> Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if not hasattr(opts, "rootRank"):
            opts = Defaults(root=opts or 0, timeout=timeout)
        (tensor,) = tensors
        root = opts.rootRank
        memory, back = _tensors.inout(tensor) if self._own_rank == root else _tensors.target(tensor)
        buffer = _tensors.content(memory)
        call = Call("broadcast", root=root, count=buffer.nbytes)
        if self._own_rank == root:
            back = None
        if buffer.nbytes and self._at_once(
            call,
            buffer.nbytes,
            opts,
            lambda small, wait: small.broadcast(array_at(buffer.address, buffer.nbytes), root, wait),
            back,
        ):
            return FINISHED
        return self._add(call, lambda backend: backend.broadcast(buffer, root), back, tensors, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        return self._gather_all(output, input, opts, output)

    def _gather_all(
        self, output: Tensor, given: Tensor, opts: Options, result: Any, finish: Finish | None = None
    ) -> Work:
        own, (whole, back) = _tensors.source(given), _tensors.target(output)
        source, target = _tensors.content(own), _tensors.content(whole)
        nbytes, size = source.nbytes, self._own_size
        if target.nbytes != nbytes * size:
            raise InvalidArgumentError(
                f"all_gather: the output has room for {output.numel()} elements, but {size} ranks give {given.numel()} "
                "each"
            )
        call = Call("all_gather", count=nbytes)
        done = _tensors.joined([back, finish])
        overlaps = source.address < target.address + target.nbytes and target.address < source.address + nbytes
        in_place = source.address == target.address + self._own_rank * nbytes
        if nbytes and overlaps and not in_place:
            own = own.clone()
            source = _tensors.content(own)
        if nbytes and self._at_once(
            call,
            nbytes,
            opts,
            lambda small, wait: small.allgather(
                array_at(source.address, nbytes), array_at(target.address, nbytes * size), wait
            ),
            done,
        ):
            return FINISHED
        return self._add(call, lambda backend: backend.allgather(source, target, [nbytes] * size), done, result, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Options = None, timeout: timedelta | None = None) -> Work:
        if isinstance(inputs, Tensor):
            outputs, inputs, opts = [outputs], [inputs], Defaults(timeout=timeout)
        (parts,), (given,) = outputs, inputs
        for part in parts:
            _tensors.check(part)
        whole = torch.empty((self._own_size, *given.shape), dtype=given.dtype, device="cpu")

        def finish() -> None:
            with torch.no_grad():
                for part, block in zip(parts, whole.unbind(0), strict=True):
                    part.detach().copy_(block.view(part.shape))

        return self._gather_all(whole, given, opts, outputs, finish)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> Work:
        works = [
            self._gather_all(output, given, opts, list(outputs)) for output, given in zip(outputs, inputs, strict=True)
        ]
        return works[-1]

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options = None
    ) -> Work:
        works = [self.allgather([[row[n] for row in outputs]], [given], opts) for n, given in enumerate(inputs)]
        return works[-1]

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Options = None,
    ) -> Work:
        sent = self._block_bytes(input, input_split_sizes, "input")
        received = self._block_bytes(output, output_split_sizes, "output")
        return self._exchange(Call("all_to_all"), output, input, sent, received, opts, output)

    def _block_bytes(self, tensor: Tensor, splits: Sequence[int], which: str) -> list[int]:
        """Return the bytes of each rank's block of a tensor, which is cut along its first dimension."""
        size, rows = self._own_size, tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise InvalidArgumentError(
                    f"all_to_all: the {which} has {rows} rows, which {size} ranks cannot share equally; give its split "
                    "sizes"
                )
            return [tensor.nbytes // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise InvalidArgumentError(
                f"all_to_all: split sizes {list(splits)} of the {which} must be {size} numbers that add up to its "
                f"{rows} rows"
            )
        row = tensor.nbytes // rows if rows else 0
        return [rows_of_one * row for rows_of_one in splits]

    def _exchange(
        self,
        call: Call,
        output: Tensor,
        given: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        opts: Options,
        result: Any,
        finish: Finish | None = None,
    ) -> Work:
        own, (whole, back) = _tensors.source(given), _tensors.target(output)
        if own.data_ptr() == whole.data_ptr():
            own = own.clone()
        source, target = _tensors.content(own), _tensors.content(whole)
        return self._add(
            call,
            lambda backend: backend.alltoall(source, target, sent, received),
            _tensors.joined([back, finish]),
            result,
            opts,
            sum(sent) or sum(received),
        )

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None) -> Work:
        for tensor in (*outputs, *inputs):
            _tensors.check(tensor)
        own = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        whole = torch.empty(sum(tensor.numel() for tensor in outputs), dtype=own.dtype, device="cpu")

        def finish() -> None:
            with torch.no_grad():
                blocks = torch.split(whole, [tensor.numel() for tensor in outputs])
                for tensor, block in zip(outputs, blocks, strict=True):
                    tensor.detach().copy_(block.view(tensor.shape))

        sent, received = [tensor.nbytes for tensor in inputs], [tensor.nbytes for tensor in outputs]
        return self._exchange(Call("all_to_all"), whole, own, sent, received, opts, list(outputs), finish)

    def gather(self, outputs: Any, inputs: Any, opts: Options = None, *more: Any) -> Work:
        if isinstance(inputs, Tensor):  # gather(outputs, input, root)
            outputs, inputs, opts = [outputs], [inputs], Defaults(root=opts or 0)
        (given,), root, size = inputs, opts.rootRank, self._own_size
        is_root = root == self._own_rank
        for part in outputs[0] if is_root else ():
            _tensors.check(part)
        nbytes = given.nbytes
        whole = torch.empty((size if is_root else 0, *given.shape), dtype=given.dtype, device="cpu")

        def finish() -> None:
            with torch.no_grad():
                for part, block in zip(outputs[0], whole.unbind(0), strict=True):
                    part.detach().copy_(block.view(part.shape))

        sent = [nbytes if rank == root else 0 for rank in range(size)]
        received = [nbytes if is_root else 0] * size
        call = Call("gather", root=root, count=nbytes)
        return self._exchange(call, whole, given, sent, received, opts, outputs, finish if is_root else None)

    def scatter(self, outputs: Any, inputs: Any, opts: Options = None, *more: Any) -> Work:
        if isinstance(outputs, Tensor):  # scatter(output, inputs, root)
            outputs, inputs, opts = [outputs], [inputs], Defaults(root=opts or 0)
        (output,), root, size = outputs, opts.rootRank, self._own_size
        is_root = root == self._own_rank
        nbytes = output.nbytes
        if is_root:
            for part in inputs[0]:
                _tensors.check(part)
            own = torch.cat([part.detach().reshape(-1) for part in inputs[0]])
        else:
            own = torch.empty(0, dtype=output.dtype, device="cpu")
        sent, received = [nbytes if is_root else 0] * size, [nbytes if rank == root else 0 for rank in range(size)]
        return self._exchange(Call("scatter", root=root, count=nbytes), output, own, sent, received, opts, outputs)

    # Names of older versions of torch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

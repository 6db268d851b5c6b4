"""Documents as blocks of tokens, read ahead on one rank, and found again where a run stopped.

Documents come in an order that follows from the seed, each with an end of sequence behind it, and
are cut into blocks of equal length, with nothing lost or padded but the end of the last pass. A
position is a few numbers, so that a resumed run reads nothing of what lies before it.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset

from components.documents import Documents
from components.strategy import SECONDS_AFTER_THE_WATCH

TOKENS, PLACES, NUMBERS = range(3)  # the rows of a block


@dataclass(frozen=True)
class Position:
    """A place in the text.

    Attributes:
        passes: passes over all documents that are done.
        document: documents that are done in this pass, in its order.
        token: tokens that are done of the next document.
        reader: state of a streamed data set at the start of the shuffled window; None: its start.
        left_out: documents that could not be used so far.
    """

    passes: int = 0
    document: int = 0
    token: int = 0
    reader: dict[str, Any] | None = None
    left_out: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the position as a checkpoint has it."""
        state = dataclasses.asdict(self)
        state["pass"] = state.pop("passes")
        return state

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> "Position":
        """Return the position that `to_json` has written."""
        state = dict(state)
        return cls(passes=state.pop("pass"), **state)


START = Position()
Numbered = tuple[int, Any, Position]  # number of a document from 1, its row, and where it begins
PlacedBlock = tuple[torch.Tensor, Position]  # a block, and the position behind it


# ---- Documents in order ----
def read_documents(
    documents: Documents, start: Position, passes: float, seed: int, buffer_size: int
) -> Iterator[Numbered]:
    """Yield document after document from a position, in another order in each pass.

    The order is one of all documents or, where they can only be streamed, of window after window.
    It follows from the seed, so that a position is found without what lies before it.

    Args:
        passes: over all documents; math.inf for no end.
        buffer_size: documents of a window, for those that are streamed.
    """
    position = start
    while position.passes < passes:
        if isinstance(documents.dataset, Dataset):
            yield from read_indexed_pass(documents, position, seed)
        else:
            yield from read_streamed_pass(documents, position, seed, buffer_size)
        position = Position(passes=position.passes + 1, left_out=position.left_out)


def read_indexed_pass(documents: Documents, start: Position, seed: int) -> Iterator[Numbered]:
    """Yield the documents that are left of a pass over a data set that is shuffled as a whole."""
    dataset: Any = documents.dataset
    order = shuffled(len(dataset), (seed, start.passes, 0))
    position = start
    for place in range(start.document, len(dataset)):
        position = replace(position, document=place)
        chosen = int(order[place])
        yield documents.num_before + chosen + 1, dataset[chosen], position
        position = replace(position, token=0)


def read_streamed_pass(
    documents: Documents, start: Position, seed: int, buffer_size: int
) -> Iterator[Numbered]:
    """Yield the documents that are left of a pass over a stream, shuffled window by window."""
    stream: Any = documents.dataset
    stream.load_state_dict(start.reader)  # None: its start
    reading = iter(stream)
    before = start.document // buffer_size * buffer_size  # documents before the window
    position = start
    window = list(islice(reading, buffer_size))
    while window:
        order = shuffled(len(window), (seed, start.passes, before))
        for place in range(position.document - before, len(window)):
            position = replace(position, document=before + place)
            chosen = int(order[place])
            yield documents.num_before + before + chosen + 1, window[chosen], position
            position = replace(position, token=0)
        before += len(window)
        position = replace(position, document=before, reader=stream.state_dict())
        window = list(islice(reading, buffer_size))


def shuffled(number: int, seed: tuple[int, int, int]) -> np.ndarray:
    """Return the numbers from 0 in an order that follows from a seed."""
    return np.random.default_rng(seed).permutation(number)


# ---- Blocks ----
def cut_blocks(
    numbered: Iterable[Numbered], documents: Documents, tokenizer: Any, max_length: int
) -> Iterator[PlacedBlock]:
    """Yield blocks of max_length tokens, each with the position of the token behind it.

    A block is [3, max_length + 1]: tokens, of which the last one is only predicted, since the next
    block begins with it; the place of each in its document's part of the block; the number of its
    document, 0 behind the end of the data.

    Raises:
        ValueError: a document cannot be used: its file and line, the cause and the fix.
    """
    block = torch.zeros(3, max_length + 1, dtype=torch.int32)
    filled = 0
    left_out = 0
    position = START
    for number, row, position in numbered:
        text = documents.text_of(row, number)
        if text is None:
            left_out += 1
        tokens = tokenize_document(text, tokenizer)
        start = position.token
        while start < len(tokens):
            part = tokens[start : start + max_length + 1 - filled]
            end = filled + len(part)
            block[TOKENS, filled:end] = part
            block[PLACES, filled:end] = torch.arange(len(part))
            block[NUMBERS, filled:end] = number
            filled = end
            start += len(part)
            if filled > max_length:
                start -= 1  # the next block begins with it
                yield block, replace(position, token=start, left_out=position.left_out + left_out)
                block = torch.zeros_like(block)
                filled = 0
    if filled:
        behind = Position(passes=position.passes + 1, left_out=position.left_out + left_out)
        yield block, behind


def tokenize_document(text: str | None, tokenizer: Any) -> torch.Tensor:
    """Return the tokens of a document and its end: [tokens]; none if it has no text."""
    if text is None or not text.strip():
        return torch.zeros(0, dtype=torch.int32)
    tokens = list(tokenizer(text, verbose=False)["input_ids"])
    end = tokenizer.eos_token_id
    if end is not None and tokens[-1:] != [end]:
        tokens.append(end)
    return torch.tensor(tokens, dtype=torch.int32)


def count_tokens(block: torch.Tensor) -> int:
    """Return how many tokens a model reads of a block: neither the last nor padding."""
    return int((block[NUMBERS, :-1] > 0).sum())


# ---- For all ranks ----
class BlockStream:
    """The blocks of a run, step by step. One rank reads ahead in a thread, and deals to all.

    Each rank would have to tokenize all text to know where its own blocks begin.

    Attributes:
        position: behind the blocks of the last step.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Any,
        args: Any,
        accelerator: Accelerator,
        passes: float,
        blocks_per_step: int,
    ) -> None:
        """passes: over all documents; math.inf reads them again without end."""
        self.position = START
        self._documents = documents
        self._tokenizer = tokenizer
        self._args = args
        self._accelerator = accelerator
        self._passes = passes
        self._blocks_per_step = blocks_per_step
        self._blocks: Iterator[PlacedBlock] | None = None
        self._ahead: Future | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._group: Any = None
        if accelerator.is_main_process:
            self._thread = ThreadPoolExecutor(1)
        if accelerator.num_processes > 1:
            # Over TCP: GLOO_SOCKET_IFNAME names the interface that connects several hosts
            timeout = timedelta(seconds=args.ddp_timeout + SECONDS_AFTER_THE_WATCH)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)

    @property
    def epoch(self) -> float:
        """Passes that are done, with the part of this one where its documents are counted."""
        if not isinstance(self._documents.dataset, Dataset):
            return float(self.position.passes)
        return self.position.passes + self.position.document / len(self._documents.dataset)

    def describe(self) -> str:
        """Return how much of the data was read, and what of it could not be used."""
        position = self.position
        return (
            f"The data were read {position.passes} times, and {position.document} documents more; "
            f"{position.left_out} could not be used and were left out"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON."""
        return self.position.to_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position; before the first step."""
        self.position = Position.from_json(state)

    def next_step(self, is_last: bool) -> list[list[torch.Tensor]]:
        """Return the blocks of this rank's micro-batches; every rank takes part.

        Args:
            is_last: whether nothing has to be read ahead.

        Raises:
            ValueError: on every rank, if a document cannot be used.
        """
        dealt = self._deal()
        if isinstance(dealt, str):
            raise ValueError(dealt)
        if not is_last:
            self._read_ahead()
        self.position = dealt[-1][1]
        size = self._args.per_device_train_batch_size
        rank = self._accelerator.process_index
        # Micro-batch j is for rank j % ranks
        starts = range(0, self._blocks_per_step, size)[rank :: self._accelerator.num_processes]
        return [[block for block, _ in dealt[start : start + size]] for start in starts]

    def _deal(self) -> list[PlacedBlock] | str:
        """Return the blocks of the next step on every rank, or why a document cannot be used."""
        if self._thread is not None and self._ahead is None:
            self._read_ahead()
        told: list[Any] = [None]
        if self._ahead is not None:
            try:
                told = [self._ahead.result()]
            except ValueError as error:
                told = [str(error)]
        if self._group is not None:  # from host to host
            torch.distributed.broadcast_object_list(told, group=self._group)
        return told[0]

    def _read_ahead(self) -> None:
        """Begin to read the blocks of a step, on the rank that reads."""
        if self._thread is None:
            return
        if self._blocks is None:
            args = self._args
            numbered = read_documents(
                self._documents, self.position, self._passes, args.seed, args.shuffle_buffer_size
            )
            self._blocks = cut_blocks(numbered, self._documents, self._tokenizer, args.max_length)
        self._ahead = self._thread.submit(list, islice(self._blocks, self._blocks_per_step))


def first_blocks(
    documents: Documents, tokenizer: Any, max_length: int, number: int
) -> list[torch.Tensor]:
    """Return the first blocks of documents in their own order, such as those to evaluate on."""
    numbered = ((place, row, START) for place, row in enumerate(documents.dataset, 1))
    blocks = cut_blocks(numbered, documents, tokenizer, max_length)
    return [block for block, _ in islice(blocks, number)]


def deal_blocks(
    blocks: Sequence[torch.Tensor], size: int, accelerator: Accelerator
) -> list[Sequence[torch.Tensor]]:
    """Return this rank's batches of `size` blocks: every rank has as many, the last maybe empty."""
    starts = starts_of_batches(len(blocks), size, accelerator.num_processes)
    own = starts[accelerator.process_index :: accelerator.num_processes]
    return [blocks[start : start + size] for start in own]


def starts_of_batches(number: int, size: int, num_processes: int) -> Sequence[int]:
    """Return where batches of `size` begin, as many for each rank, of `number` blocks."""
    per_round = size * num_processes
    return range(0, math.ceil(number / per_round) * per_round, size)

"""US counties and their vote of 2012, read from the raw tables with the standard library."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset, download_url

_ADJACENCY = "adjacency.txt"
_VOTES = "election.csv"

#: Feature columns in order: (file, column) of the year 2012.
_FEATURES = (
    ("income.csv", "MedianIncome2012"),
    ("population.csv", "R_NET_MIG_2012"),
    ("population.csv", "R_birth_2012"),
    ("population.csv", "R_death_2012"),
    ("education.csv", "BachelorRate2012"),
    ("unemployment.csv", "Unemployment_rate_2012"),
)


class USElection(InMemoryDataset):
    r"""The US-election graph of 2012 (Jia and Benson, arXiv 2002.08274) as a PyG dataset.

    Nodes are the counties of ``adjacency.txt`` in ascending order of their FIPS code, edges join
    neighbouring counties (both directions; the file also lists every county beside itself). The
    six features are median income, net migration rate, birth rate, death rate, bachelor rate and
    unemployment rate; a missing value becomes the mean of its column, and each column so filled
    is standardised by its mean and sample standard deviation. The label is 1 where the GOP has
    more votes than the DEM. Counties without votes (122 in the published files, most of them in
    Puerto Rico and Alaska) take the mean of both columns, which labels them 0.

    Args:
        root: Folder that has (or gets) the raw files under ``us-election/raw``.
    """

    url = "https://raw.githubusercontent.com/000Justin000/gnn-residual-correlation/HEAD/datasets/election"
    name = "us-election"

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.load(self.processed_paths[0])

    @property
    def raw_dir(self) -> str:
        """Folder of the raw files."""
        return str(Path(self.root) / self.name / "raw")

    @property
    def processed_dir(self) -> str:
        """Folder of the processed file."""
        return str(Path(self.root) / self.name / "processed")

    @property
    def raw_file_names(self) -> list[str]:
        """The adjacency list and five tables."""
        return [_ADJACENCY, _VOTES, *dict.fromkeys(file for file, _ in _FEATURES)]

    @property
    def processed_file_names(self) -> str:
        """The one processed file."""
        return "data.pt"

    def download(self) -> None:
        """Fetch the raw files from the repository of the paper's authors."""
        for file in self.raw_file_names:
            download_url(f"{self.url}/{file}", self.raw_dir)

    def process(self) -> None:
        """Read the raw files and save the graph."""
        x, edge_index, y = read_us_election(Path(self.raw_dir))
        self.save([Data(x=x, edge_index=edge_index, y=y)], self.processed_paths[0])


def read_us_election(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    r"""Features, edges and labels of :class:`USElection` from the raw files in ``folder``.

    Returns:
        ``x`` :math:`[N, 6]`, ``edge_index`` :math:`[2, E]` sorted by its first row and ``y``
        :math:`[N]`.
    """
    pairs = list(_read_adjacency(folder / _ADJACENCY))
    counties = sorted({fips for pair in pairs for fips in pair})
    position = {fips: index for index, fips in enumerate(counties)}
    edges = sorted((position[source], position[target]) for source, target in pairs)

    columns = [_standardise(_read_column(folder / file, name, counties)) for file, name in _FEATURES]
    gop = _fill(_read_column(folder / _VOTES, "gop_2012", counties))
    dem = _fill(_read_column(folder / _VOTES, "dem_2012", counties))
    return (
        torch.stack(columns, dim=1).float(),
        torch.tensor(edges, dtype=torch.int64).t().contiguous(),
        (gop > dem).long(),
    )


def _read_adjacency(path: Path) -> Iterator[tuple[int, int]]:
    """Pairs of FIPS codes; a line without a first county continues the one above."""
    current: int | None = None
    with path.open(newline="", encoding="latin-1") as file:
        for number, row in enumerate(csv.reader(file, delimiter="\t"), start=1):
            if not row:
                continue
            if len(row) != 4 or not row[3].isdigit() or (row[1] and not row[1].isdigit()):
                raise ValueError(f"{path.name}, line {number}: four tab-separated fields wanted")
            if row[1]:
                current = int(row[1])
            if current is None:
                raise ValueError(f"{path.name}, line {number}: no county to continue")
            yield current, int(row[3])


def _read_column(path: Path, column: str, counties: list[int]) -> Tensor:
    """One value for each county, NaN where the table has none; float64 ``[N]``."""
    values: dict[int, float] = {}
    with path.open(newline="", encoding="latin-1") as file:
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        if column not in header:
            raise ValueError(f"{path.name} has no column {column!r}")
        index = header.index(column)
        for row in reader:
            if len(row) > index and (text := row[index].strip().replace(",", "")):
                try:
                    values[int(row[0])] = float(text)
                except ValueError as error:
                    raise ValueError(f"{path.name}, line {reader.line_num}: {error}") from None
    return torch.tensor([values.get(fips, math.nan) for fips in counties], dtype=torch.float64)


def _fill(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), values.nanmean(), values)


def _standardise(values: Tensor) -> Tensor:
    filled = _fill(values)
    spread = filled.std()
    # A constant column says nothing: zeros rather than a division by zero.
    return (filled - filled.mean()) / (spread if spread > 0 else 1.0)

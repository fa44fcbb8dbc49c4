"""Reductions over groups of rows: sums, maxima with their winners, and rows put back."""

import torch

from edgeweave.scatter import gather, scatter_reduce


def main() -> None:
    # Five measurements of two quantities, from three stations; station 1 sent nothing.
    station = torch.tensor([0, 2, 0, 2, 2])
    values = torch.tensor([[1.0, 8.0], [2.0, 5.0], [3.0, 7.0], [4.0, 5.0], [6.0, 1.0]])

    print("sum ", scatter_reduce(values, station, dim_size=3).tolist())
    print("mean", scatter_reduce(values, station, dim_size=3, reduce="mean").tolist())

    # The first row that holds each maximum; the number of rows (5) where a station has none.
    largest, winner = scatter_reduce(values, station, dim_size=3, reduce="amax", return_arg=True)
    print("amax", largest.tolist(), "rows", winner.tolist())

    # Distance of each measurement from the mean of its station.
    mean = scatter_reduce(values, station, dim_size=3, reduce="mean")
    print("difference from the station's mean", (values - gather(mean, station)).tolist())

    # An index that is out of range is an error, not a crash.
    try:
        scatter_reduce(values, torch.tensor([0, 2, 3, 2, 2]), dim_size=3)
    except IndexError as error:
        print("error:", error)


if __name__ == "__main__":
    main()

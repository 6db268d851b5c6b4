# SPDX-License-Identifier: Apache-2.0
"""Find the largest number of something that fits."""

import math
from collections.abc import Callable


def largest_that_fits(
    peak: Callable[[int], int], card: int, low: int, at_low: int, most: int, guess: int
) -> int:
    """Return the largest whole number from `low` to `most` with peak(number) <= card.

    The peak never decreases with the number, and is nearly linear, so that a few guesses along a
    line suffice. For peaks that are not, every other guess bisects the rest on a logarithmic scale.

    Args:
        peak: returns the bytes that a number takes.
        card: the bytes that are available.
        low: a number that fits.
        at_low: its peak.
        most: the largest number to consider.
        guess: the number to try first.
    """
    high = most + 1  # a number that does not fit, or is not considered
    at_high = None  # its peak, once a number has been found that does not fit
    slope = 0.0
    halves_next = True
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        size = peak(guess)
        if size <= card:
            slope = (size - at_low) / (guess - low)
            low = guess
            at_low = size
        else:
            high = guess
            at_high = size
        if at_high is None:
            guess = along_slope(low, card - at_low, slope)
            continue
        halves_next = not halves_next
        if halves_next:
            guess = math.isqrt(low * high)
        else:
            guess = low + int((card - at_low) * (high - low) / (at_high - at_low))
    return low


def along_slope(low: int, room: int, slope: float) -> int:
    """Return the number at which a line from `low` with this slope has used `room` bytes."""
    if slope == 0:
        return 2 * low
    return low + int(room / slope)

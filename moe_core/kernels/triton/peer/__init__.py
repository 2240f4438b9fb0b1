"""Tokens to the ranks of their experts and sums back, written straight into memory that the ranks of one host share.

Every rank has one buffer of the same layout, into which all others can write (`buffer`, `layout`). A token goes once
to each rank that has any of its experts, to a place of its own, so that nobody has to count first; then its sender
raises a number that the receiver waits for. The host waits for nothing, so that a forward can be captured.

Four launches in this order make a forward (`exchange`): send tokens, receive ids, (the experts), return sums, add up
sums. All ranks make all four of them in every forward, without tokens too, and one forward after the other. The second
waits for the tokens of every rank, the last for the sums of every rank, this one's too. So no place is written again
before it has been read, without a second buffer:

* a rank sends tokens only after it has got all sums of the forward before, which every other rank returns when it has
  read the tokens and ids before;
* it returns sums only after it has got the tokens of the same forward from every rank, each of which sent them when it
  had added up the sums before.

Numbers are such places: one is raised only after its reader has seen it as it was. Whoever waits finds it at the
forward before or at this one, never ahead, so that it is enough to look whether they are equal, and int32 numbers of
forwards may go around.

The second and the last launch wait for ranks, not for the launch in front of them, and may start while that still runs
(programmatic dependent launch). They begin when every program of that one runs and has waited for all launches before:

* what they read was written before that one began, or by it and then announced;
* what they write is memory that nobody used when that one began;
* they take no room on the device from programs that they wait for, since these run already;
* they end after it, so that whoever waits for their end has waited for all launches before.
"""

from __future__ import annotations

"""The plain fold: the same tables from the same log, without Faust.

The oracle of the contract tests, and what a command uses that needs the tables once (`odradek report`).
"""

from odradek.streams.log import EventLog
from odradek.streams.projections.tables import TABLES, Rows


async def fold(log: EventLog) -> dict[str, Rows]:
    """Every table, by name, from the first to the stable end of its source."""
    tables: dict[str, Rows] = {table.name: {} for table in TABLES}
    for topic in {table.topic.name for table in TABLES}:
        readers = [table for table in TABLES if table.topic.name == topic]
        for partition, end in (await log.stable_ends(topic)).items():
            async for record in log.read(topic, partition, await log.beginning(topic, partition), end):
                for table in readers:
                    table.step(tables[table.name], record)
    return tables

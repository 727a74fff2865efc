"""Types of the values that many routes share, each with its example for the OpenAPI document.

The examples describe a cluster with the topic `flights` and the group `banks`. A typed dict beside each route describes
its response. Type checkers check the code against the typed dict. FastAPI uses it only for the document, and neither
validates nor serializes responses with it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.convertors import StringConvertor, register_url_convertor


class _IdConvertor(StringConvertor):
    """Converts `{…:id}` in a path: the id of a group or a member. Such an id may have slashes.

    A server decodes %2F before the app matches the path. An id in a path does not end with a slash, so that a redirect
    removes the trailing slash of a path.
    """

    regex = ".*[^/]"


register_url_convertor("id", _IdConvertor())

Topic = Annotated[str, Field(examples=["flights"])]
Group = Annotated[str, Field(examples=["banks"])]
ClusterId = Annotated[str, Field(examples=["lkc-1"])]
MemberId = Annotated[str, Field(examples=["member-1"])]
ClientId = Annotated[str, Field(examples=["penstock"])]
ConfigName = Annotated[str, Field(examples=["cleanup.policy"])]
Application = Annotated[str, Field(examples=["banks"])]
Store = Annotated[str, Field(examples=["sessions"])]
Stage = Annotated[str, Field(examples=["process"])]
RecordKey = Annotated[str, Field(examples=["UA"])]
Host = Annotated[str, Field(examples=["localhost"])]
Instance = Annotated[str, Field(examples=["host-4711"])]
"""An instance of an application: the name of its host and its process id."""
Text = Annotated[str, Field(examples=[""])]

Partition = Annotated[int, Field(examples=[0])]
Broker = Annotated[int, Field(examples=[1])]
Port = Annotated[int, Field(examples=[9092])]
Offset = Annotated[int, Field(examples=[17])]
Count = Annotated[int, Field(examples=[3])]
Lag = Annotated[int, Field(examples=[6])]
TimeMs = Annotated[int, Field(examples=[1357016400000])]
Rate = Annotated[float, Field(examples=[1200.0])]
Milliseconds = Annotated[float, Field(examples=[4.5])]
Seconds = Annotated[float, Field(examples=[12.5])]

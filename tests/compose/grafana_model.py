"""Models the part of Grafana's dashboards and provisioning files that kvmesh uses. Unknown fields are errors.

https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
https://grafana.com/docs/grafana/latest/administration/provisioning/
"""

from typing import Annotated, Literal

import msgspec

Text = Annotated[str, msgspec.Meta(min_length=1)]
RefId = Annotated[str, msgspec.Meta(pattern="^[A-Z]$")]


class Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    pass


class DataSourceRef(Strict):
    type: Literal["prometheus"]
    uid: Text


class GridPos(Strict):
    h: Annotated[int, msgspec.Meta(ge=1)]
    w: Annotated[int, msgspec.Meta(ge=1, le=24)]
    x: Annotated[int, msgspec.Meta(ge=0, lt=24)]
    y: Annotated[int, msgspec.Meta(ge=0)]


class Target(Strict):
    ref_id: RefId
    datasource: DataSourceRef
    expr: Text
    legend_format: str
    instant: bool


class Custom(Strict):
    line_width: Annotated[int, msgspec.Meta(ge=0, le=10)]
    fill_opacity: Annotated[int, msgspec.Meta(ge=0, le=100)]
    show_points: Literal["auto", "always", "never"]


class Defaults(Strict):
    # Ids from getCategories of @grafana/data.
    unit: Literal["short", "s", "reqps", "percentunit"]
    custom: Custom | None = None


class FieldConfig(Strict):
    defaults: Defaults
    overrides: list[None]


class Legend(Strict):
    display_mode: Literal["list", "table", "hidden"]
    placement: Literal["bottom", "right"]


class Tooltip(Strict):
    mode: Literal["single", "multi", "none"]


class ReduceOptions(Strict):
    calcs: list[Literal["lastNotNull", "last", "mean", "max", "min", "sum"]]


class Options(Strict):
    legend: Legend | None = None
    tooltip: Tooltip | None = None
    reduce_options: ReduceOptions | None = None
    color_mode: Literal["value", "background", "none"] | None = None


class PanelModel(Strict):
    id: Annotated[int, msgspec.Meta(ge=1)]
    type: Literal["timeseries", "stat"]
    title: Text
    description: Text
    datasource: DataSourceRef
    grid_pos: GridPos
    targets: Annotated[list[Target], msgspec.Meta(min_length=1, max_length=26)]
    field_config: FieldConfig
    options: Options


class TimeRange(Strict):
    from_: str = msgspec.field(name="from")
    to: str


class NothingListed(Strict):
    list_: list[None] = msgspec.field(name="list")


class Link(Strict):
    title: Text
    type: Literal["dashboards", "link"]
    tags: list[str]
    as_dropdown: bool


class DashboardModel(Strict):
    uid: Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,40}$")]
    title: Text
    tags: list[str]
    timezone: Literal["browser", "utc", ""]
    schema_version: Annotated[int, msgspec.Meta(ge=36)]
    editable: bool
    graph_tooltip: Annotated[int, msgspec.Meta(ge=0, le=2)]
    refresh: Annotated[str, msgspec.Meta(pattern="^[0-9]+[smh]$")]
    time: TimeRange
    templating: NothingListed
    annotations: NothingListed
    links: list[Link]
    panels: Annotated[list[PanelModel], msgspec.Meta(min_length=1)]


class JsonData(Strict):
    time_interval: str


class DataSource(Strict):
    name: Text
    uid: Text
    type: Literal["prometheus", "jaeger"]
    access: Literal["proxy"]
    url: Annotated[str, msgspec.Meta(pattern="^http://[a-z]+:[0-9]+$")]
    is_default: bool = False
    editable: bool = True
    json_data: JsonData | None = None


class DataSources(Strict):
    api_version: Literal[1]
    datasources: list[DataSource]


class ProviderOptions(Strict):
    path: Text


class Provider(Strict):
    name: Text
    folder: str
    type: Literal["file"]
    disable_deletion: bool
    allow_ui_updates: bool
    options: ProviderOptions


class Providers(Strict):
    api_version: Literal[1]
    providers: list[Provider]

"""Settings of files and batches."""

from dataclasses import dataclass

from kvmesh.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Limits of uploaded files and of the batches made of them."""

    is_on: bool = setting(True, "Take files and run batches.")
    directory: str = setting("", "Directory of files and progress; empty: batches in the state directory.")
    file_bytes_max: int = setting(200 << 20, "Largest uploaded file, as OpenAI's.", min=1024)
    files_bytes_max: int = setting(10 << 30, "All files together.", min=1024)
    files_max: int = setting(10_000, "Files kept.", min=1)
    file_ttl_s: float = setting(30 * 86_400.0, "How long a file is kept that names no time itself; 30 days.", min=1)
    uploads_max: int = setting(8, "Uploads at once.", min=1)
    upload_timeout_s: float = setting(3600.0, "Longest upload.", min=1)
    batches_max: int = setting(10_000, "Batches kept, ended ones included.", min=1)
    batch_ttl_s: float = setting(30 * 86_400.0, "How long an ended batch is listed; 30 days.", min=1)
    window_s_max: float = setting(7 * 86_400.0, "Longest completion window; 7 days.", min=1)
    lines_max: int = setting(50_000, "Requests in one batch, as OpenAI's.", min=1)
    line_bytes_max: int = setting(4 << 20, "Longest line of an input file.", min=256)
    running_max: int = setting(4, "Batches that one frontend works on at a time.", min=1)
    lines_in_flight_max: int = setting(16, "Requests of batches in flight on one frontend.", min=1)
    frontend_share_max: float = setting(
        0.5, "No new request of a batch is started above this share of the frontend's requests_max.", min=0.01, max=1
    )
    priority: int = setting(-100, "Scheduling priority of a batch's requests; larger goes first.", min=-100, max=100)
    attempts_max: int = setting(3, "Tries of a request whose worker was lost.", min=1)
    retry_s_max: float = setting(
        10.0, "Longest pause before a request that was refused for load is tried again.", min=0.1
    )
    lease_s: float = setting(
        15.0, "How long a batch stays with a frontend that is silent; then another goes on with it.", min=0.3
    )
    poll_s: float = setting(2.0, "Pause between two looks for batches to run.", min=0.02)
    sweep_s: float = setting(300.0, "Pause between two looks for files and batches that are too old.", min=0.05)
    busy_timeout_s: float = setting(10.0, "Longest wait for another process that writes to the file.", min=0.01)
    calls_max: int = setting(1024, "Calls that wait for the store; more are refused with Retry-After.", min=1)

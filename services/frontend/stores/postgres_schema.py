"""The tables in PostgreSQL. `MIGRATIONS[i]` is the script from schema version i to i + 1; statements end with two semicolons.

Names and columns are those of the SQLite schemas, so that the stores' statements run on both. Text that orders pages compares by bytes.
"""

_FIRST = """
CREATE TABLE files (
  id TEXT COLLATE "C" PRIMARY KEY,
  owner TEXT COLLATE "C" NOT NULL,
  name TEXT NOT NULL,
  purpose TEXT NOT NULL,
  size_bytes BIGINT NOT NULL,
  created_s DOUBLE PRECISION NOT NULL,
  expires_s DOUBLE PRECISION NOT NULL
);;
CREATE INDEX files_by_age ON files (owner, created_s, id);;
CREATE TABLE contents (
  file_id TEXT COLLATE "C" NOT NULL,
  part BIGINT NOT NULL,
  is_last BIGINT NOT NULL,
  stored_s DOUBLE PRECISION NOT NULL,
  data BYTEA NOT NULL,
  PRIMARY KEY (file_id, part)
);;
CREATE TABLE batches (
  id TEXT COLLATE "C" PRIMARY KEY,
  owner TEXT COLLATE "C" NOT NULL,
  endpoint TEXT NOT NULL,
  input_file_id TEXT COLLATE "C" NOT NULL,
  completion_window TEXT NOT NULL,
  metadata TEXT,
  output_ttl_s DOUBLE PRECISION,
  status TEXT NOT NULL,
  created_s DOUBLE PRECISION NOT NULL,
  expires_s DOUBLE PRECISION NOT NULL,
  in_progress_s DOUBLE PRECISION,
  finalizing_s DOUBLE PRECISION,
  completed_s DOUBLE PRECISION,
  failed_s DOUBLE PRECISION,
  expired_s DOUBLE PRECISION,
  cancelling_s DOUBLE PRECISION,
  cancelled_s DOUBLE PRECISION,
  ended_s DOUBLE PRECISION,
  total BIGINT NOT NULL DEFAULT 0,
  completed BIGINT NOT NULL DEFAULT 0,
  failed BIGINT NOT NULL DEFAULT 0,
  unrun BIGINT NOT NULL DEFAULT 0,
  input_tokens BIGINT NOT NULL DEFAULT 0,
  cached_tokens BIGINT NOT NULL DEFAULT 0,
  output_tokens BIGINT NOT NULL DEFAULT 0,
  reasoning_tokens BIGINT NOT NULL DEFAULT 0,
  model TEXT,
  errors TEXT,
  output_file_id TEXT,
  error_file_id TEXT,
  defects BIGINT NOT NULL DEFAULT 0,
  lease_owner TEXT NOT NULL DEFAULT '',
  lease_until_s DOUBLE PRECISION NOT NULL DEFAULT 0,
  lease_epoch BIGINT NOT NULL DEFAULT 0
);;
CREATE INDEX batches_by_age ON batches (owner, created_s, id);;
CREATE INDEX batches_to_run ON batches (created_s) WHERE ended_s IS NULL;;
CREATE TABLE results (
  batch_id TEXT COLLATE "C" NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
  line BIGINT NOT NULL,
  is_error BIGINT NOT NULL,
  record BYTEA NOT NULL,
  PRIMARY KEY (batch_id, line)
);;
CREATE TABLE responses (
  id TEXT COLLATE "C" PRIMARY KEY,
  owner TEXT COLLATE "C" NOT NULL,
  previous_id TEXT COLLATE "C",
  created_s DOUBLE PRECISION NOT NULL,
  used_s DOUBLE PRECISION NOT NULL,
  body BYTEA NOT NULL,
  items BYTEA NOT NULL,
  size_bytes BIGINT NOT NULL
);;
CREATE INDEX responses_by_use ON responses (owner, used_s);;
CREATE TABLE totals (size_bytes BIGINT NOT NULL);;
INSERT INTO totals VALUES (0);;
CREATE FUNCTION count_responses() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    UPDATE totals SET size_bytes = totals.size_bytes + NEW.size_bytes;
  ELSE
    UPDATE totals SET size_bytes = totals.size_bytes - OLD.size_bytes;
  END IF;
  RETURN NULL;
END
$$;;
CREATE TRIGGER responses_counted AFTER INSERT OR DELETE ON responses
  FOR EACH ROW EXECUTE FUNCTION count_responses()
"""
MIGRATIONS = (_FIRST,)

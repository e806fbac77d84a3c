"""Roles in PostgreSQL: what an officer, a spender and a reader can do, by the database's own rules.

| | reads | opens runs, spends | creates budgets, gives back, imports | changes a record |
|---|---|---|---|---|
| reader | yes | no | no | no |
| spender | yes | yes | no | no |
| officer | yes | yes | yes | no |

Triggers let nobody change or delete a record, let a spender move sums only upwards and within the
limit, and compare the user in a record with the database's user. A superuser, or the owner of the
tables, can switch triggers off: keys and anchors are against them.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from diminuendo.errors import InputError
from diminuendo.ledger.book import Ledger

ROLES = ("officer", "spender", "reader")

_SQL = """
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'diminuendo_reader') THEN
    CREATE ROLE diminuendo_reader NOLOGIN; END IF;
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'diminuendo_spender') THEN
    CREATE ROLE diminuendo_spender NOLOGIN; END IF;
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'diminuendo_officer') THEN
    CREATE ROLE diminuendo_officer NOLOGIN; END IF;
END $$;
--
GRANT diminuendo_reader TO diminuendo_spender;
--
GRANT diminuendo_spender TO diminuendo_officer;
--
REVOKE ALL ON diminuendo_head, diminuendo_records, diminuendo_budgets, diminuendo_runs FROM PUBLIC;
--
GRANT SELECT ON diminuendo_head, diminuendo_records, diminuendo_budgets, diminuendo_runs
  TO diminuendo_reader;
--
GRANT INSERT ON diminuendo_records, diminuendo_runs TO diminuendo_spender;
--
GRANT UPDATE (seq, digest) ON diminuendo_head TO diminuendo_spender;
--
GRANT UPDATE (spent) ON diminuendo_budgets TO diminuendo_spender;
--
GRANT UPDATE (status, granted, started, confirmed, spent, opened, nonce) ON diminuendo_runs
  TO diminuendo_spender;
--
GRANT INSERT ON diminuendo_budgets TO diminuendo_officer;
--
CREATE OR REPLACE FUNCTION diminuendo_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'rows of % are never changed or deleted', TG_TABLE_NAME
    USING ERRCODE = 'insufficient_privilege';
END $$;
--
CREATE OR REPLACE FUNCTION diminuendo_is_officer() RETURNS boolean LANGUAGE sql STABLE AS
  $$ SELECT pg_has_role(session_user, 'diminuendo_officer', 'MEMBER') $$;
--
CREATE OR REPLACE FUNCTION diminuendo_check_record() RETURNS trigger LANGUAGE plpgsql
  SET search_path FROM CURRENT AS $$
DECLARE
  head diminuendo_head%ROWTYPE;
  content json := NEW.body::json;
  terms json;
  price numeric;
BEGIN
  SELECT * INTO head FROM diminuendo_head;
  IF NEW.seq <> head.seq + 1 OR NEW.previous <> head.digest OR NEW.digest <> 'sha256:' || encode(
      sha256(convert_to('[' || NEW.seq || ',' || to_json(NEW.at) || ',' || to_json(NEW.kind) || ','
        || to_json(NEW.budget) || ',' || to_json(NEW.run) || ',' || to_json(NEW.token) || ','
        || to_json(NEW.body) || ',' || to_json(NEW.previous) || ']', 'UTF8')), 'hex') THEN
    RAISE EXCEPTION 'the record does not follow the last one'
      USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF content ->> 'db_user' IS DISTINCT FROM session_user::text THEN
    RAISE EXCEPTION 'the record names another database user'
      USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF NOT diminuendo_is_officer() THEN
    IF NEW.kind NOT IN ('open', 'resume', 'grant', 'start', 'close', 'share') THEN
      RAISE EXCEPTION '% needs an officer', NEW.kind USING ERRCODE = 'insufficient_privilege';
    END IF;
    IF content -> 'after' ->> 'spent' IS DISTINCT FROM
        (SELECT spent FROM diminuendo_budgets WHERE name = NEW.budget) THEN
      RAISE EXCEPTION 'the record states another sum' USING ERRCODE = 'insufficient_privilege';
    END IF;
  END IF;
  IF NEW.kind = 'grant' THEN
    SELECT b.terms::json INTO terms FROM diminuendo_budgets b WHERE name = NEW.budget;
    IF terms ->> 'composition' = 'gaussian' THEN
      SELECT sum((e ->> 2)::numeric * power(2::numeric, 200) / power((e ->> 0)::numeric, 2))
        * CASE terms -> 'budget' ->> 'relation' WHEN 'replace-one' THEN 4 ELSE 1 END
        INTO price FROM json_array_elements(content -> 'events') e
        WHERE json_typeof(e -> 0) = 'number';
      IF (content ->> 'cost')::numeric < price * 0.999999 THEN
        RAISE EXCEPTION 'the grant costs less than its events do'
          USING ERRCODE = 'insufficient_privilege';
      END IF;
    END IF;
  END IF;
  RETURN NEW;
END $$;
--
CREATE OR REPLACE FUNCTION diminuendo_check_head() RETURNS trigger LANGUAGE plpgsql
  SET search_path FROM CURRENT AS $$
BEGIN
  IF NEW.ledger <> OLD.ledger OR NOT EXISTS (SELECT FROM diminuendo_records r
      WHERE r.seq = OLD.seq + 1 AND r.seq = NEW.seq AND r.digest = NEW.digest) THEN
    RAISE EXCEPTION 'the head only moves to the next record'
      USING ERRCODE = 'insufficient_privilege';
  END IF;
  RETURN NEW;
END $$;
--
CREATE OR REPLACE FUNCTION diminuendo_check_budget() RETURNS trigger LANGUAGE plpgsql
  SET search_path FROM CURRENT AS $$
DECLARE most numeric;
BEGIN
  IF (NEW.name, NEW.terms, NEW.data) IS DISTINCT FROM (OLD.name, OLD.terms, OLD.data) THEN
    RAISE EXCEPTION 'the terms of a budget never change' USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF NOT diminuendo_is_officer() THEN
    IF NEW.spent::numeric < OLD.spent::numeric THEN
      RAISE EXCEPTION 'giving budget back needs an officer'
        USING ERRCODE = 'insufficient_privilege';
    END IF;
    SELECT (r.body::json ->> 'limit')::numeric INTO most FROM diminuendo_records r
      WHERE r.budget = NEW.name AND r.kind IN ('create', 'import') ORDER BY r.seq LIMIT 1;
    IF NEW.spent::numeric > most THEN
      RAISE EXCEPTION 'it goes over the budget' USING ERRCODE = 'insufficient_privilege';
    END IF;
  END IF;
  RETURN NEW;
END $$;
--
CREATE OR REPLACE FUNCTION diminuendo_check_run() RETURNS trigger LANGUAGE plpgsql
  SET search_path FROM CURRENT AS $$
BEGIN
  IF NOT diminuendo_is_officer() AND (OLD.status <> 'open' OR NEW.status NOT IN ('open', 'closed')
      OR NEW.granted < OLD.granted OR NEW.confirmed < OLD.confirmed
      OR NEW.spent::numeric < OLD.spent::numeric
      OR (NEW.started < OLD.started AND NEW.status = 'open')) THEN
    RAISE EXCEPTION 'counts of a run go up only, and one that ended stays ended'
      USING ERRCODE = 'insufficient_privilege';
  END IF;
  RETURN NEW;
END $$;
--
CREATE OR REPLACE TRIGGER diminuendo_check BEFORE INSERT ON diminuendo_records
  FOR EACH ROW EXECUTE FUNCTION diminuendo_check_record();
--
CREATE OR REPLACE TRIGGER diminuendo_keep BEFORE UPDATE OR DELETE ON diminuendo_records
  FOR EACH ROW EXECUTE FUNCTION diminuendo_refuse();
--
CREATE OR REPLACE TRIGGER diminuendo_keep_all BEFORE TRUNCATE ON diminuendo_records
  FOR EACH STATEMENT EXECUTE FUNCTION diminuendo_refuse();
--
CREATE OR REPLACE TRIGGER diminuendo_check BEFORE UPDATE OF seq, digest, ledger ON diminuendo_head
  FOR EACH ROW EXECUTE FUNCTION diminuendo_check_head();
--
CREATE OR REPLACE TRIGGER diminuendo_keep BEFORE DELETE ON diminuendo_head
  FOR EACH ROW EXECUTE FUNCTION diminuendo_refuse();
--
CREATE OR REPLACE TRIGGER diminuendo_check BEFORE UPDATE ON diminuendo_budgets
  FOR EACH ROW EXECUTE FUNCTION diminuendo_check_budget();
--
CREATE OR REPLACE TRIGGER diminuendo_keep BEFORE DELETE ON diminuendo_budgets
  FOR EACH ROW EXECUTE FUNCTION diminuendo_refuse();
--
CREATE OR REPLACE TRIGGER diminuendo_check BEFORE UPDATE ON diminuendo_runs
  FOR EACH ROW EXECUTE FUNCTION diminuendo_check_run();
--
CREATE OR REPLACE TRIGGER diminuendo_keep BEFORE DELETE ON diminuendo_runs
  FOR EACH ROW EXECUTE FUNCTION diminuendo_refuse();
"""


def statements(grants: dict[str, list[str]] | None = None) -> list[str]:
    """The SQL statements that install the roles, in order.

    grants  database users for each role, e.g. {"spender": ["alice"]}
    """
    found = [part.strip().rstrip(";") for part in _SQL.split("\n--\n")]
    for role, users in (grants or {}).items():
        if role not in ROLES:
            raise InputError(f"one of {', '.join(ROLES)}", name="the role", value=role)
        for user in users:
            quoted = '"' + user.replace('"', '""') + '"'
            found.append(f"GRANT diminuendo_{role} TO {quoted}")
    return found


def install(ledger: Ledger, grants: dict[str, list[str]] | None = None) -> None:
    """Run the statements on a ledger's database, all or none; needs the owner of its tables."""
    if ledger.url.get_backend_name() == "sqlite":
        raise InputError(
            "on PostgreSQL",
            name="the ledger",
            value=ledger.address,
            remedy="A SQLite file has no users; its protection is the file's permissions.",
        )

    def work(connection: Connection) -> None:
        for statement in statements(grants):
            connection.execute(text(statement.replace(":", "\\:")))

    ledger.administer(work)

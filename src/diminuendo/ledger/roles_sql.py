"""The SQL of `diminuendo ledger roles`: three roles, and rules that the database itself keeps.

Rights say who may touch which table and column. Constraint triggers look at a transaction when it
commits: every record must follow from the one before it, and every row must be what the last
record about it says. They read tables by a fixed path, so that a table of the same name that
somebody made for themselves is not taken for ours. `{schema}` is where the ledger's tables are.

Prices of steps are compared with lower bounds that take no loop (exact for full-batch steps):
`verify` compares them exactly.
"""

RIGHTS = """
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
REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC;
--
GRANT USAGE ON SCHEMA {schema} TO diminuendo_reader;
--
REVOKE ALL ON {schema}.diminuendo_head, {schema}.diminuendo_records, {schema}.diminuendo_budgets,
  {schema}.diminuendo_runs FROM PUBLIC;
--
GRANT SELECT ON {schema}.diminuendo_head, {schema}.diminuendo_records, {schema}.diminuendo_budgets,
  {schema}.diminuendo_runs TO diminuendo_reader;
--
GRANT INSERT ON {schema}.diminuendo_records, {schema}.diminuendo_runs TO diminuendo_spender;
--
GRANT UPDATE (seq, digest) ON {schema}.diminuendo_head TO diminuendo_spender;
--
GRANT UPDATE (spent) ON {schema}.diminuendo_budgets TO diminuendo_spender;
--
GRANT UPDATE (status, granted, started, confirmed, spent, opened, nonce) ON {schema}.diminuendo_runs
  TO diminuendo_spender;
--
GRANT INSERT ON {schema}.diminuendo_budgets TO diminuendo_officer
"""

HELPERS = """
CREATE OR REPLACE FUNCTION {schema}.diminuendo_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'rows of % are never changed or deleted', TG_TABLE_NAME
    USING ERRCODE = 'insufficient_privilege';
END $$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_require(good boolean, words text) RETURNS void
  LANGUAGE plpgsql AS $$
BEGIN
  IF good IS NOT TRUE THEN
    RAISE EXCEPTION '%', words USING ERRCODE = 'insufficient_privilege';
  END IF;
END $$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_is_officer() RETURNS boolean LANGUAGE sql STABLE AS
  $$ SELECT pg_has_role(session_user, 'diminuendo_officer', 'MEMBER') $$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_mu(epsilon float8) RETURNS float8
  LANGUAGE plpgsql IMMUTABLE AS $$
-- Not more than the least mu of a release with a pure epsilon: the normal tail at mu/2 is
-- 1/(1 + e^epsilon), and at least (sqrt(4 + x*x) - x)/2 times the density (Birnbaum 1942).
DECLARE
  tail float8 := 1 / (1 + exp(least(epsilon, 700)));
  low float8 := 0; high float8 := 40; middle float8;
BEGIN
  FOR i IN 1..60 LOOP
    middle := (low + high) / 2;
    IF (sqrt(4 + middle * middle) - middle) / 2 * exp(greatest(-middle * middle / 2, -700))
        / sqrt(2 * pi()) > tail THEN low := middle; ELSE high := middle; END IF;
  END LOOP;
  RETURN greatest(2 * low, sqrt(2 * pi()) * (1 - 2 * tail));
END $$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_term(a float8, k float8, sigma float8, rate float8)
  RETURNS float8 LANGUAGE plpgsql IMMUTABLE AS $$
-- One term of the sum in a subsampled step's divergence of order a: k is 2 or a.
DECLARE
  exponent float8 := k * (k - 1) / 2 / sigma / sigma;
  logarithm float8 := CASE WHEN k = 2 THEN ln(a * (a - 1) / 2) ELSE 0 END
    + k * ln(rate) + CASE WHEN k < a THEN (a - k) * ln(1 - rate) ELSE 0 END
    + CASE WHEN exponent > 1e-8 THEN exponent + ln(1 - exp(-least(exponent, 700)))
           ELSE ln(exponent) END;
BEGIN
  RETURN CASE WHEN logarithm > 700 THEN logarithm WHEN logarithm < -700 THEN 0
    WHEN logarithm < -18 THEN exp(logarithm) ELSE ln(1 + exp(logarithm)) END / (a - 1);
END $$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_step(a float8, sigma float8, rate float8)
  RETURNS float8 LANGUAGE sql IMMUTABLE SET search_path = {schema}, pg_temp AS $$
  SELECT CASE WHEN rate = 1 THEN a / 2 / sigma / sigma
    ELSE greatest(diminuendo_term(a, 2, sigma, rate), diminuendo_term(a, a, sigma, rate)) END
$$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_price(terms json, events json) RETURNS float8
  LANGUAGE plpgsql IMMUTABLE SET search_path = {schema}, pg_temp AS $$
-- A lower bound on what events cost a budget.
DECLARE
  a float8 := (terms ->> 'order')::float8;
  swapped boolean := terms -> 'budget' ->> 'relation' = 'replace-one';
  total float8 := 0; one float8; e json; x json; sigma float8; rate float8;
BEGIN
  FOR e IN SELECT * FROM json_array_elements(events) LOOP
    IF json_typeof(e -> 0) = 'number' THEN
      sigma := (e ->> 0)::float8; rate := (e ->> 1)::float8;
      IF sigma > 1e100 THEN
        one := 0;  -- floating point ends before the price does
      ELSIF a IS NULL OR rate = 1 THEN
        one := coalesce(a / 2, 1) / sigma / sigma * CASE WHEN swapped THEN 4 ELSE 1 END;
      ELSIF swapped THEN
        one := (a - 0.5) / (a - 1) * diminuendo_step(2 * a, sigma, rate)
          + diminuendo_step(2 * a - 1, sigma, rate);
      ELSE
        one := diminuendo_step(a, sigma, rate);
      END IF;
    ELSE
      x := e -> 1;
      one := CASE e ->> 0
        WHEN 'pure' THEN CASE WHEN (x ->> 'epsilon')::float8 < 1e-100 THEN 0
          WHEN a IS NULL THEN diminuendo_mu((x ->> 'epsilon')::float8) ^ 2
          ELSE least((x ->> 'epsilon')::float8, a / 2 * (x ->> 'epsilon')::float8 ^ 2) END
        WHEN 'laplace' THEN CASE WHEN (x ->> 'scale')::float8 > 1e100 THEN 0
          WHEN a IS NULL THEN diminuendo_mu(1 / (x ->> 'scale')::float8) ^ 2
          ELSE greatest((ln(a / (2 * a - 1)) + (a - 1) / (x ->> 'scale')::float8) / (a - 1), 0) END
        WHEN 'discrete-gaussian' THEN CASE WHEN (x ->> 'noise_multiplier')::float8 > 1e100 THEN 0
          ELSE a / 2 / (x ->> 'noise_multiplier')::float8 ^ 2 END
        WHEN 'zcdp' THEN a * (x ->> 'rho')::float8
        ELSE (SELECT min((pair ->> 1)::float8) FROM json_array_elements(x -> 'curve') pair
          WHERE (pair ->> 0)::float8 >= a) END;
    END IF;
    total := total + one * (e ->> 2)::float8;
  END LOOP;
  RETURN total;
END $$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_label(kind text, moment timestamptz) RETURNS text
  LANGUAGE sql STABLE AS $$
  SELECT to_char(moment AT TIME ZONE 'UTC', CASE kind WHEN 'day' THEN 'YYYY-MM-DD'
    WHEN 'week' THEN 'IYYY-"W"IW' WHEN 'month' THEN 'YYYY-MM' WHEN 'quarter' THEN 'YYYY-"Q"Q'
    ELSE 'YYYY' END)
$$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_agree(budget_name text, run_id text) RETURNS void
  LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
-- A budget's and a run's row must be what the last record about each says.
DECLARE r diminuendo_runs%ROWTYPE; stated json;
BEGIN
  IF budget_name <> '' THEN
    SELECT x.body::json -> 'after' INTO stated FROM diminuendo_records x
      WHERE x.budget = budget_name ORDER BY x.seq DESC LIMIT 1;
    PERFORM diminuendo_require(stated ->> 'spent' = b.spent AND stated ->> 'terms'
        = left(encode(sha256(convert_to(b.terms, 'UTF8')), 'hex'), 32)
        AND b.data = coalesce(b.terms::json ->> 'data', ''),
      'the last record states another sum than its budget has')
      FROM diminuendo_budgets b WHERE b.name = budget_name;
    PERFORM diminuendo_require(FOUND, 'the budget is unknown');
  END IF;
  IF run_id <> '' THEN
    SELECT x.body::json -> 'after' -> 'run' INTO stated FROM diminuendo_records x
      WHERE x.run = run_id ORDER BY x.seq DESC LIMIT 1;
    SELECT * INTO r FROM diminuendo_runs WHERE id = run_id;
    PERFORM diminuendo_require(stated::jsonb = jsonb_build_array(r.status, r.granted, r.started,
      r.confirmed, r.spent, (r.opened::json ->> 'turn')::int, r.nonce),
      'the last record states other counts than its run has');
  END IF;
END $$
"""

RULES = """
CREATE OR REPLACE FUNCTION {schema}.diminuendo_check_approval(
  new_record {schema}.diminuendo_records, content json) RETURNS void LANGUAGE plpgsql
  SET search_path = {schema}, pg_temp AS $$
-- What needs two people was proposed before by another user of the database.
DECLARE
  terms json; guardian text; proposal diminuendo_records%ROWTYPE; first jsonb;
  new_terms json := content -> 'terms';
BEGIN
  IF new_record.kind = 'reclaim' THEN
    SELECT b.terms::json INTO terms FROM diminuendo_budgets b WHERE name = new_record.budget;
    IF (terms ->> 'two_persons')::boolean IS NOT TRUE THEN RETURN; END IF;
    SELECT * INTO proposal FROM diminuendo_records r
      WHERE r.run = new_record.run AND r.seq < new_record.seq ORDER BY r.seq DESC LIMIT 1;
    first := proposal.body::jsonb;
    PERFORM diminuendo_require(proposal.kind = 'propose' AND first ->> 'action' = 'reclaim'
      AND first ->> 'db_user' <> session_user
      AND first -> 'unreleased' = content::jsonb -> 'unreleased', 'it needs two people');
    RETURN;
  END IF;
  SELECT b.name INTO guardian FROM diminuendo_budgets b
    WHERE (b.terms::json ->> 'two_persons')::boolean
      AND (b.name = new_record.budget OR b.name = new_terms ->> 'parent'
           OR (b.data <> '' AND b.data = new_terms ->> 'data'))
      AND EXISTS (SELECT FROM diminuendo_records r WHERE r.budget = b.name
        AND r.seq < new_record.seq AND r.kind IN ('create', 'import')
        AND (r.kind = 'create' OR r.body::json ->> 'digest' <> content ->> 'digest'))
    ORDER BY b.name = new_record.budget DESC, b.name IS NOT DISTINCT FROM new_terms ->> 'parent',
      b.name LIMIT 1;
  IF guardian IS NULL THEN RETURN; END IF;
  SELECT * INTO proposal FROM diminuendo_records r WHERE r.budget = guardian
    AND r.run = '' AND r.kind = 'propose' AND r.seq < new_record.seq ORDER BY r.seq DESC LIMIT 1;
  first := proposal.body::jsonb;
  PERFORM diminuendo_require(first ->> 'action' = new_record.kind
    AND first ->> 'db_user' <> session_user
    AND CASE new_record.kind WHEN 'create' THEN first -> 'terms' = new_terms::jsonb
      ELSE (first ->> 'origin', first ->> 'digest', first ->> 'overspend')
        = (content ->> 'origin', content ->> 'digest', content ->> 'overspend')
        AND NOT EXISTS (SELECT FROM diminuendo_records r WHERE r.budget = new_record.budget
          AND r.kind = 'import' AND r.seq > proposal.seq AND r.seq < new_record.seq) END,
    'it needs two people');
END $$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_check_shares(new_record {schema}.diminuendo_records,
  content json) RETURNS void LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
-- What a grant costs, or a run gives back, is shared with every budget that its own is a part of.
DECLARE
  above text; terms json; share diminuendo_records%ROWTYPE; number bigint := new_record.seq;
  unit numeric := power(2::numeric, 200);
BEGIN
  SELECT b.terms::json ->> 'parent' INTO above FROM diminuendo_budgets b
    WHERE name = new_record.budget;
  WHILE above IS NOT NULL LOOP
    number := number + 1;
    SELECT * INTO share FROM diminuendo_records WHERE seq = number;
    SELECT b.terms::json INTO terms FROM diminuendo_budgets b WHERE name = above;
    PERFORM diminuendo_require(share.kind = 'share' AND share.budget = above
      AND share.body::json ->> 'run' = new_record.run, 'the share of a parent is missing');
    IF new_record.kind = 'grant' THEN
      PERFORM diminuendo_require(((share.body::json ->> 'cost')::numeric / unit)::float8
        >= diminuendo_price(terms, content -> 'events') * 0.999999,
        'the share of a parent is too small');
    END IF;
    above := terms ->> 'parent';
  END LOOP;
END $$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_check_counts(new_record {schema}.diminuendo_records,
  content json) RETURNS void LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
-- A run's counts follow from those that the record before states.
DECLARE old json; now json := content -> 'after' -> 'run';
BEGIN
  SELECT r.body::json -> 'after' -> 'run' INTO old FROM diminuendo_records r
    WHERE r.run = new_record.run AND r.seq < new_record.seq ORDER BY r.seq DESC LIMIT 1;
  IF new_record.kind = 'open' THEN
    PERFORM diminuendo_require(old IS NULL AND now::jsonb = '["open", 0, 0, 0, "0", 0, ""]',
      'a run begins with nothing');
    RETURN;
  END IF;
  PERFORM diminuendo_require(old ->> 0 = 'open', 'a run that ended stays ended');
  PERFORM diminuendo_require(
    (now ->> 1)::bigint = (old ->> 1)::bigint
      + CASE new_record.kind WHEN 'grant' THEN (content ->> 'steps')::bigint ELSE 0 END
    AND (new_record.kind <> 'grant' OR content ->> 'first' = old ->> 1)
    AND (now ->> 4)::numeric = (old ->> 4)::numeric + CASE
      WHEN new_record.kind = 'grant' THEN (content ->> 'cost')::numeric
      WHEN new_record.kind IN ('close', 'reclaim') THEN -(content ->> 'returned')::numeric
      ELSE 0 END
    AND (now ->> 4)::numeric >= 0 AND (now ->> 2)::bigint <= (now ->> 1)::bigint
    AND (now ->> 3)::bigint BETWEEN (old ->> 3)::bigint AND (now ->> 2)::bigint
    AND ((now ->> 2)::bigint >= (old ->> 2)::bigint OR new_record.kind IN ('close', 'reclaim')),
    'counts of a run go up only');
  PERFORM diminuendo_require(new_record.kind <> 'close' OR content ->> 'used' = old ->> 2
    OR (b.terms::json ->> 'two_persons')::boolean IS NOT TRUE,
    'giving back what was started needs two people')
    FROM diminuendo_budgets b WHERE b.name = new_record.budget;
END $$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_check_record() RETURNS trigger LANGUAGE plpgsql
  SET search_path = {schema}, pg_temp AS $$
DECLARE
  content json := NEW.body::json;
  stated json := content -> 'after';
  officer boolean := diminuendo_is_officer();
  last diminuendo_records%ROWTYPE;
  root diminuendo_records%ROWTYPE;
  old json; terms json; label text; most numeric; moved numeric; base numeric;
BEGIN
  SELECT * INTO last FROM diminuendo_records WHERE seq = NEW.seq - 1;
  PERFORM diminuendo_require(
    NEW.previous = CASE WHEN NEW.seq = 1 THEN 'sha256:' || encode(sha256(convert_to(
        'diminuendo ledger ' || h.ledger, 'UTF8')), 'hex') ELSE last.digest END
    AND NEW.seq <= h.seq AND NEW.digest = 'sha256:' || encode(
      sha256(convert_to('[' || NEW.seq || ',' || to_json(NEW.at) || ',' || to_json(NEW.kind) || ','
        || to_json(NEW.budget) || ',' || to_json(NEW.run) || ',' || to_json(NEW.token) || ','
        || to_json(NEW.body) || ',' || to_json(NEW.previous) || ']', 'UTF8')), 'hex'),
    'the record does not follow the last one') FROM diminuendo_head h;
  PERFORM diminuendo_require(content ->> 'db_user' = session_user::text
    AND coalesce(content ->> 'user', session_user::text) = session_user::text,
    'the record names another database user');
  PERFORM diminuendo_require(NEW.at::timestamptz BETWEEN clock_timestamp() - interval '10 minutes'
    AND clock_timestamp() + interval '10 seconds', 'the record is of another time');
  PERFORM diminuendo_require(officer OR NEW.kind IN ('open', 'resume', 'grant', 'start', 'close',
    'share', 'anchor'), NEW.kind || ' needs an officer');
  IF NEW.kind = 'anchor' THEN
    PERFORM diminuendo_require(NEW.budget = '', 'an anchor belongs to no budget');
    RETURN NULL;
  END IF;
  SELECT r.body::json -> 'after' INTO old FROM diminuendo_records r
    WHERE r.budget = NEW.budget AND r.seq < NEW.seq ORDER BY r.seq DESC LIMIT 1;
  SELECT b.terms::json INTO terms FROM diminuendo_budgets b WHERE name = NEW.budget;
  SELECT (r.body::json ->> 'limit')::numeric INTO most FROM diminuendo_records r
    WHERE r.budget = NEW.budget AND r.kind IN ('create', 'import') ORDER BY r.seq LIMIT 1;
  PERFORM diminuendo_require((old IS NULL) = (NEW.kind IN ('create', 'import')
      AND (SELECT min(seq) FROM diminuendo_records WHERE budget = NEW.budget) = NEW.seq),
    'a budget begins with its creation');
  root := NEW;
  WHILE root.kind = 'share' LOOP
    SELECT * INTO last FROM diminuendo_records WHERE seq = root.seq - 1;
    PERFORM diminuendo_require((last.kind IN ('grant', 'close', 'reclaim', 'release')
        AND last.run = content ->> 'run' OR last.kind = 'share'
        AND last.body::json ->> 'run' = content ->> 'run')
      AND root.budget = (SELECT b.terms::json ->> 'parent' FROM diminuendo_budgets b
        WHERE name = last.budget), 'nothing is to be shared');
    root := last;
  END LOOP;
  base := coalesce((old ->> 'spent')::numeric, 0);
  IF terms ->> 'window' IS NOT NULL THEN
    label := old -> 'window' ->> 1;
    IF root.kind IN ('create', 'grant', 'import') THEN
      label := greatest(label, diminuendo_label(terms ->> 'window', NEW.at::timestamptz));
    END IF;
    IF label IS DISTINCT FROM old -> 'window' ->> 1 THEN base := 0; END IF;
    PERFORM diminuendo_require(stated -> 'window' ->> 1 = label AND stated -> 'window' ->> 0
      = coalesce(old -> 'window' ->> 0, label), 'the record states another window');
  END IF;
  moved := CASE WHEN NEW.kind IN ('grant', 'share', 'import') THEN (content ->> 'cost')::numeric
    WHEN NEW.kind IN ('close', 'reclaim') THEN -(content ->> 'returned')::numeric ELSE 0 END;
  PERFORM diminuendo_require((stated ->> 'spent')::numeric = base + moved AND base + moved >= 0,
    'the record states another sum');
  PERFORM diminuendo_require(officer OR moved >= 0, 'giving budget back needs an officer');
  PERFORM diminuendo_require(moved >= 0 OR root.kind IN ('close', 'reclaim'),
    'only a run that ends gives back');
  PERFORM diminuendo_require(moved <= 0 OR base + moved <= most
    OR NEW.kind = 'import' AND content ->> 'overspend' = 'true', 'it goes over the budget');
  IF NEW.kind = 'grant' THEN
    PERFORM diminuendo_require((moved / power(2::numeric, 200))::float8
      >= diminuendo_price(terms, content -> 'events') * 0.999999,
      'the grant costs less than its events do');
  END IF;
  IF NEW.kind IN ('grant', 'close', 'reclaim') THEN
    PERFORM diminuendo_check_shares(NEW, content);
  END IF;
  IF NEW.kind IN ('create', 'import', 'reclaim') THEN
    PERFORM diminuendo_check_approval(NEW, content);
  END IF;
  IF NEW.kind IN ('open', 'resume', 'grant') AND terms -> 'members' IS NOT NULL THEN
    PERFORM diminuendo_require(EXISTS (SELECT FROM json_array_elements_text(terms -> 'members') m
        WHERE m = session_user::text OR EXISTS (SELECT FROM pg_roles WHERE rolname = m
          AND pg_has_role(session_user, oid, 'MEMBER'))), 'the user is no member of the budget');
  END IF;
  IF NEW.kind IN ('create', 'import') THEN
    PERFORM diminuendo_require(terms::jsonb = (content -> 'terms')::jsonb,
      'the record states other terms');
  END IF;
  IF NEW.kind IN ('open', 'resume', 'grant', 'start', 'close', 'reclaim', 'propose')
      AND NEW.run <> '' THEN
    PERFORM diminuendo_check_counts(NEW, content);
    PERFORM diminuendo_agree(NEW.budget, NEW.run);
  ELSE
    PERFORM diminuendo_agree(NEW.budget, '');
  END IF;
  RETURN NULL;
END $$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_check_head() RETURNS trigger LANGUAGE plpgsql
  SET search_path = {schema}, pg_temp AS $$
BEGIN
  PERFORM diminuendo_require(NEW.ledger = OLD.ledger AND EXISTS (SELECT FROM diminuendo_records r,
      diminuendo_head h WHERE r.seq = h.seq AND r.digest = h.digest
      AND r.seq = (SELECT max(seq) FROM diminuendo_records)),
    'the head is the last record');
  RETURN NULL;
END $$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_check_budget() RETURNS trigger LANGUAGE plpgsql
  SET search_path = {schema}, pg_temp AS $$
BEGIN
  PERFORM diminuendo_require(TG_OP = 'INSERT' OR (NEW.name, NEW.terms, NEW.data)
    IS NOT DISTINCT FROM (OLD.name, OLD.terms, OLD.data), 'the terms of a budget never change');
  PERFORM diminuendo_agree(NEW.name, '');
  RETURN NULL;
END $$;
--
CREATE OR REPLACE FUNCTION {schema}.diminuendo_check_run() RETURNS trigger LANGUAGE plpgsql
  SET search_path = {schema}, pg_temp AS $$
DECLARE said jsonb; row diminuendo_runs%ROWTYPE;
BEGIN
  SELECT * INTO row FROM diminuendo_runs WHERE id = NEW.id;
  SELECT jsonb_object_agg(key, value ORDER BY r.seq) INTO said FROM diminuendo_records r,
    jsonb_each(r.body::jsonb - 'after' - 'db_user')
    WHERE r.run = NEW.id AND r.kind IN ('open', 'resume');
  PERFORM diminuendo_require((TG_OP = 'INSERT' OR NEW.budget = OLD.budget AND NEW.id = OLD.id)
    AND row.opened::jsonb = said AND EXISTS (SELECT FROM diminuendo_records r WHERE r.run = NEW.id
      AND r.kind = 'open' AND r.budget = row.budget), 'the run is not what its records say');
  PERFORM diminuendo_agree('', NEW.id);
  RETURN NULL;
END $$
"""

_TABLES = {
    "records": ("INSERT", "diminuendo_check_record", "UPDATE OR DELETE"),
    "head": ("UPDATE", "diminuendo_check_head", "INSERT OR DELETE"),
    "budgets": ("INSERT OR UPDATE", "diminuendo_check_budget", "DELETE"),
    "runs": ("INSERT OR UPDATE", "diminuendo_check_run", "DELETE"),
}
"""Of each table: what is checked at the commit, by which function, and what is always refused."""


def triggers(schema: str) -> list[str]:
    """The statements that attach the rules to the tables."""
    found = []
    for name, (checked, function, refused) in _TABLES.items():
        table = f"{schema}.diminuendo_{name}"
        found += [
            f"DROP TRIGGER IF EXISTS diminuendo_check ON {table}",
            f"CREATE CONSTRAINT TRIGGER diminuendo_check AFTER {checked} ON {table} "
            f"DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {schema}.{function}()",
            f"CREATE OR REPLACE TRIGGER diminuendo_keep BEFORE {refused} ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION {schema}.diminuendo_refuse()",
            f"CREATE OR REPLACE TRIGGER diminuendo_keep_all BEFORE TRUNCATE ON {table} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {schema}.diminuendo_refuse()",
        ]
    return found

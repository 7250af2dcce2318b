pragma page_size=4096;
pragma application_id=1264675685;
pragma user_version=6;
PRAGMA page_size=4096;
BEGIN TRANSACTION;
DROP TABLE IF EXISTS appends;
CREATE TABLE appends (session integer primary key, replies blob);
INSERT INTO appends VALUES(1,X'616161616161616161616161616161619C94FAFF5411A737280000000000');
DROP TABLE IF EXISTS begun;
CREATE TABLE begun (session integer primary key, generates blob);
INSERT INTO begun VALUES(1,X'28000000000000000167676767676767676767676767676767002782C2A26B3336720481297BC23070');
DROP TABLE IF EXISTS copies;
CREATE TABLE copies (
    session integer primary key, file text unique not null, length integer not null, bytes integer not null,
    header_crc integer not null, crc integer not null);
INSERT INTO copies VALUES(1,'eb4735c175fa8c291ca072402e585168-47-c8b6f0f1.kv',47,20216,1734181795,4269729145);
DROP TABLE IF EXISTS ends;
CREATE TABLE ends (session integer primary key, position integer, mark integer, ids blob, logprobs blob, crc integer);
INSERT INTO ends VALUES(1,0,6,X'0000000000FF000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F2021222324252627703BC996F61554CD',NULL,41454745);
INSERT INTO ends VALUES(2,0,6,X'0000000000F0000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F2021222324252627703BC996',NULL,1176312965);
DROP TABLE IF EXISTS facts;
CREATE TABLE facts (name text primary key, value text) without rowid;
INSERT INTO facts VALUES('weights','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa');
DROP TABLE IF EXISTS replies;
CREATE TABLE replies (
    session integer, id text, owner text, kind text, request_id blob, digest blob, position integer, body text,
    crc integer, ended_at real, primary key (owner, request_id, kind, id)) without rowid;
CREATE INDEX replies_by_session on replies (session, kind, position);
CREATE INDEX replies_ended on replies (ended_at) where ended_at is not null;
DROP TABLE IF EXISTS sessions;
CREATE TABLE sessions (
    session integer primary key, id text unique not null, owner text not null, body text not null,
    length integer not null, used_at real not null, crc integer not null, answers integer not null default 0);
INSERT INTO sessions VALUES(1,'sQJvfd0MXF8hPib1NvY8am97BUeSo4DN','alice','{"session_id": "sQJvfd0MXF8hPib1NvY8am97BUeSo4DN", "owner": "alice", "strategy": "full", "limit_tokens": 1024, "eos_token_ids": [], "is_growing": true, "segment_tokens": 16, "mode": "batched", "codec": "", "label": "talk", "created_at": 1796078958.6205463}',48,1796078958.7528276,3796477332,2583169776);
INSERT INTO sessions VALUES(2,'uTab_7_U9GgFS8sDaqMFdZETLmsCO1oH','alice','{"session_id": "uTab_7_U9GgFS8sDaqMFdZETLmsCO1oH", "owner": "alice", "strategy": "full", "limit_tokens": 1024, "eos_token_ids": [], "is_growing": true, "segment_tokens": 16, "mode": "batched", "codec": "", "label": "fork", "created_at": 1796078958.7526588}',44,1796078958.7527382,1072970096,0);
CREATE INDEX sessions_by_owner on sessions (owner, id);
CREATE INDEX sessions_by_use on sessions (used_at);
DROP TABLE IF EXISTS tail;
CREATE TABLE tail (entry integer primary key, session integer, position integer, body blob);
DROP TABLE IF EXISTS tokens;
CREATE TABLE tokens (session integer, position integer, mark integer, ids blob, logprobs blob, crc integer);
CREATE UNIQUE INDEX tokens_by_position on tokens (session, position);
DROP TABLE IF EXISTS usage;
CREATE TABLE usage (owner text primary key, body text, crc integer) without rowid;
INSERT INTO usage VALUES('alice','{"prefilled_tokens": 40, "cached_tokens": 0, "generated_tokens": 8, "drafted_tokens": 0, "accepted_tokens": 0}',4183547027);
pragma user_version=6;
pragma application_id=1264675685;
COMMIT TRANSACTION;

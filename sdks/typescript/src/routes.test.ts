/** A proxy before two servers that hashes `kakeya-route`: a session stays where it is. */
import { expect, inject, test } from "vitest";

import { PROMPT } from "../testing/moves.js";
import { openServer, Router } from "../testing/servers.js";
import { scripted } from "../testing/scripted.js";
import * as kakeya from "./index.js";

const SESSIONS = 12; // that all go to one of two servers happens in one run of 2048
const LOST = ["CreateSession", "AppendTokens", "Generate", "ForkSession", "CloseSession"];

test("every call of a session and of its forks arrives at one server", async () => {
  const control = inject("control");
  const servers = await Promise.all([0, 1].map(() => openServer(control, {})));
  const router = await Router.before(
    control,
    servers.map(({ target }) => target),
  );
  await using client = new kakeya.Client(router.target, { retry: { firstDelaySeconds: 0.02 } });
  const results = new Set<string>();
  for (let made = 0; made < SESSIONS; made++) {
    await router.lose(...LOST);
    const session = await client.createSession();
    await session.append(PROMPT);
    const answer = await session.generate(5).result();
    const fork = await session.fork();
    await fork.append(PROMPT);
    results.add(JSON.stringify([answer.tokenIds, (await fork.generate(5).result()).tokenIds]));
    expect((await session.info()).historyLength).toBe(13);
    expect([await fork.close(), await session.close()]).toEqual([26, 13]);
  }
  expect(results.size).toBe(1);
  const calls = await router.passed();
  const serversOf = new Map<string, Set<number>>();
  for (const [method, route, server] of calls) {
    if (route === null) expect(method).toBe("GetServerInfo");
    else {
      expect(route).toMatch(/^[0-9a-f]{16}$/);
      serversOf.set(route, (serversOf.get(route) ?? new Set()).add(server));
    }
  }
  expect(serversOf.size).toBe(SESSIONS);
  expect([...serversOf.values()].every((each) => each.size === 1)).toBe(true);
  expect(new Set([...serversOf.values()].flatMap((each) => [...each])).size).toBe(2);
  for (const lost of LOST) expect(calls.filter(([method]) => method === lost).length).toBeGreaterThan(SESSIONS);
});

test("a session whose server is away is made by another route", async () => {
  const control = inject("control");
  const servers = await Promise.all([0, 1].map(() => openServer(control, {})));
  const router = await Router.before(
    control,
    servers.map(({ target }) => target),
  );
  await using client = new kakeya.Client(router.target, { retry: { firstDelaySeconds: 0.02 } });
  await client.serverInfo();
  await router.lose(...Array.from({ length: 4 }, () => "CreateSession"));
  const session = await client.createSession();
  expect((await session.info()).historyLength).toBe(0);
  const calls = await router.passed();
  const routes = calls.filter(([method]) => method === "CreateSession").map(([, route]) => route);
  expect([routes.length, new Set(routes).size, routes[0]]).toEqual([5, 4, routes[1]]);
  const [, route] = calls.at(-1) ?? [];
  expect(routes).toContain(route);
  expect(session.id.startsWith(`${route}.`)).toBe(true);
});

test("an older server's session keeps the route that it was made with, and so does its fork", async () => {
  const routes: (string | null)[] = [];
  const saw = (context: { readonly requestHeader: Headers }): void => {
    routes.push(context.requestHeader.get("kakeya-route"));
  };
  const server = await scripted({
    createSession: (_, context) => (saw(context), { sessionId: "s1" }),
    forkSession: (_, context) => (saw(context), { sessionId: "s2" }),
    getSessionInfo: (_, context) => (saw(context), {}),
    getServerInfo: (_, context) => (saw(context), {}),
  });
  await using client = new kakeya.Client(server.target);
  const session = await client.createSession();
  const fork = await session.fork();
  for (const each of [session, fork]) await each.info();
  await client.serverInfo();
  expect(new Set(routes.slice(0, 4)).size).toBe(1);
  expect(routes[0]).toMatch(/^[0-9a-f]{16}$/);
  expect(routes[4]).toBeNull();
  await client.close();
  await server.close();
});

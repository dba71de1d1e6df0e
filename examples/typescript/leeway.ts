// A client of a node's gateway, for agents that run elsewhere: `task.agent: external`.
//
//   const session = await open("http://node:8000", process.env.LEEWAY_TOKEN);
//   ... any OpenAI client with session.baseUrl and session.apiKey ...
//   await session.close({ score: 1 });
//
// Needs nothing but `fetch`; Node 22.18 or newer runs it as it is.

export interface Task {
  taskId: string;
  /** Which sample of the task this is. */
  index: number;
  messages: { role: string; content: string }[];
  columns: Record<string, unknown>;
}

/** What a session was worth: `score` is measured, `reward` is learned from if it differs. */
export type Outcome = { score?: number; reward?: number } & Record<string, number>;

export class Session {
  readonly id: string;
  readonly apiKey: string;
  readonly baseUrl: string;
  readonly task: Task;
  private readonly gateway: string;

  constructor(gateway: string, opened: any) {
    const { task_id: taskId, index, messages, columns } = opened.task;
    this.gateway = gateway;
    this.id = opened.id;
    this.apiKey = opened.api_key;
    this.baseUrl = opened.base_url;
    this.task = { taskId, index, messages, columns };
  }

  /** Rates one answer, by the `id` of its response. */
  async rate(turn: string, reward: number): Promise<void> {
    await this.post("rewards", { turn, reward });
  }

  /** Ends the session; what was sampled in it is trained on. */
  async close(outcome: Outcome): Promise<void> {
    await this.post("close", outcome);
  }

  private async post(what: string, body: unknown): Promise<void> {
    await call(`${this.gateway}/sessions/${this.id}/${what}`, this.apiKey, body);
  }
}

/** Opens a session; waits, as the node asks it to, while no task may be begun. */
export async function open(gateway: string, token = ""): Promise<Session> {
  for (;;) {
    const response = await fetch(`${gateway}/sessions`, {
      method: "POST",
      headers: { authorization: `Bearer ${token}` },
    });
    if (response.status === 429) {
      const seconds = Number(response.headers.get("retry-after") ?? "1");
      await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
      continue;
    }
    if (!response.ok) throw new Error(`${gateway}: ${response.status}: ${await response.text()}`);
    return new Session(gateway, await response.json());
  }
}

export async function call(url: string, key: string, body: unknown): Promise<any> {
  const response = await fetch(url, {
    method: "POST",
    headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(`${url}: ${response.status}: ${await response.text()}`);
  return response.json();
}
